import math


def matmul(a, b):
    """Product of two matrices, lists of rows."""
    return [[sum(x * row[j] for x, row in zip(line, b)) for j in range(len(b[0]))] for line in a]


def softmax(scores):
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def attention(q, k, v):
    """One causal head: q, k, v are lists of vectors, and so is the result."""
    out = []
    for i, query in enumerate(q):
        scores = [sum(a * b for a, b in zip(query, key)) / math.sqrt(len(query)) for key in k[: i + 1]]
        out.append(matmul([softmax(scores)], v[: i + 1])[0])
    return out


def heads(x, w_q, w_k, w_v):
    """w_q[h], w_k[h], w_v[h] are the matrices of head h, of width (tokens, head)."""
    outs = []
    for h in range(len(w_q)):
        # queries, keys and values of head h; append what attention makes of them
        q, k, v = matmul(x, w_q[h]), matmul(x, w_k[h]), matmul(x, w_v[h])  #?
        outs.append(attention(q, k, v))  #?
    # joined: for each token the results of all heads, side by side
    joined = [sum((out[t] for out in outs), []) for t in range(len(x))]  #?
    return joined
