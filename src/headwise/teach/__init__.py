"""The teacher: bugs that learners write, a layer with each as a switch, the check that names them; and exercises."""
