"""The layers that courses build, with their names and arguments, so that their notebooks run on this house.

`stacked` is the torch way from one causal head to many; `numpy_layer` is the same layer in NumPy alone.
"""
