import math


def softmax(row):
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    return [p / sum(powers) for p in powers]


def multi_head(q, keys, values, n_head):
    """The vector of one token, and what all tokens so far have kept; the heads lie side by side in each."""
    head_dim = len(q) // n_head
    joined = []
    for h in range(n_head):
        first = h * head_dim
        last = first + head_dim
        logits = [sum(a * b for a, b in zip(q[first:last], key[first:last])) / head_dim ** 0.5 for key in keys]
        weights = softmax(logits)
        for place in range(first, last):
            joined.append(sum(w * value[place] for w, value in zip(weights, values)))
    return joined
