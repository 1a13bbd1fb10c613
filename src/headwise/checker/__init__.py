"""The checker: bugs that learners write, a layer with each as a switch, and the search that names them."""
