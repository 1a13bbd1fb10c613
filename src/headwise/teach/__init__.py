"""The teacher: bugs that learners write, a layer with each as a switch, and the check that names them."""
