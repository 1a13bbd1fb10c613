"""The layers that courses build, with their names and arguments, so that their notebooks run with one line changed:

    from headwise.lab.courses.stacked import CausalAttention, MultiHeadAttentionWrapper, MultiHeadAttention
    from headwise.lab.courses.numpy_layer import MultiHeadAttention

`stacked` is the torch way from one causal head to many; `numpy_layer` is the same layer in NumPy alone.
"""
