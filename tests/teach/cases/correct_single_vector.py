import math


def attend(query, keys, values):
    """One query (d,), keys and values (S, d)."""
    scores = [sum(a * b for a, b in zip(query, key)) / math.sqrt(len(query)) for key in keys]
    top = max(scores)
    exps = [math.exp(s - top) for s in scores]
    weights = [e / sum(exps) for e in exps]
    return [sum(w * value[i] for w, value in zip(weights, values)) for i in range(len(values[0]))]
