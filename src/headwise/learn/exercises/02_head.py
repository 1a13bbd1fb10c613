import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def softmax(scores):
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def head(query, keys, values):
    """Weights of one query over all keys, and the mixed value."""
    scores = [dot(query, key) / math.sqrt(len(query)) for key in keys]  #?
    weights = softmax(scores)  #?
    out = [sum(w * value[e] for w, value in zip(weights, values)) for e in range(len(values[0]))]  #?
    return weights, out
