import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def softmax(row):
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    total = sum(powers)
    return [p / total for p in powers]


def attention(q, k, v, mask=None):
    d = len(q[0])
    result = []
    for i, query in enumerate(q):
        scores = [dot(query, key) / math.sqrt(d) for key in k]
        if mask is not None:
            scores = [s if ok else -math.inf for s, ok in zip(scores, mask[i])]
        weights = softmax(scores)
        row = [0.0] * len(v[0])
        for w, value in zip(weights, v):
            row = [r + w * x for r, x in zip(row, value)]
        result.append(row)
    return result
