import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def softmax(scores):
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def gradient(query, keys, values, dout):
    """Slopes along query, keys and values, when the slope along the result is dout."""
    weights = softmax([dot(query, key) for key in keys])
    dvalues = [[w * d for d in dout] for w in weights]  # out = sum w_j v_j, so dv_j = w_j dout
    dweights = [dot(dout, value) for value in values]  # and dw_j = dout . v_j
    # softmax: shared = sum w_k dw_k, and dscores: ds_j = w_j (dw_j - shared)
    shared = sum(w * d for w, d in zip(weights, dweights))  #?
    dscores = [w * (d - shared) for w, d in zip(weights, dweights)]  #?
    # s_j = q . k_j, so dquery = sum ds_j k_j
    dquery = [sum(d * key[i] for d, key in zip(dscores, keys)) for i in range(len(query))]  #?
    dkeys = [[d * x for x in query] for d in dscores]
    return dquery, dkeys, dvalues
