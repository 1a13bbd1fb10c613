import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def softmax(scores):
    top = max(scores)
    if top == -math.inf:
        return [math.nan] * len(scores)  # nothing to look at
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def causal(queries, keys):
    """Weights of all queries over all keys: one row for each query."""
    rows = []
    for i, query in enumerate(queries):
        scores = [dot(query, key) / math.sqrt(len(query)) for key in keys]
        # scores: keep those of keys 0 to i, and make the others -math.inf
        scores = [score if j <= i else -math.inf for j, score in enumerate(scores)]  #?
        rows.append(softmax(scores))
    return rows
