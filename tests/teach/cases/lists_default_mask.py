import math

def softmax(row):
    m = max(row)
    e = [math.exp(r - m) for r in row]
    s = sum(e)
    return [x / s for x in e]

def scaled_dot_product_attention(Q, K, V, mask=None):
    """Q, K, V: lists of vectors. mask[i][j] is True where i may attend to j."""
    d = len(Q[0])
    out = []
    for i, q in enumerate(Q):
        scores = [sum(a * b for a, b in zip(q, k)) / math.sqrt(d) for k in K]
        if mask is not None:
            scores = [s if mask[i][j] else -1e9 for j, s in enumerate(scores)]
        w = softmax(scores)
        out.append([sum(w[j] * V[j][c] for j in range(len(V))) for c in range(len(V[0]))])
    return out
