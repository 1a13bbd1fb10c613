"""The layers that courses build, with their names and arguments: notebooks run with one import line changed."""
