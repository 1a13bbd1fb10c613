"""Looking at heads while a model runs."""
