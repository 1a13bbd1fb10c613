import math
n_embd = 16
n_head = 4
head_dim = n_embd // n_head

def softmax(logits):
    exps = [math.exp(x - max(logits)) for x in logits]
    return [e / sum(exps) for e in exps]

def head_loop(q, keys, values, li):
    x_attn = []
    for h in range(n_head):
        hs = h * head_dim
        q_h = q[hs:hs + head_dim]
        k_h = [key[hs:hs + head_dim] for key in keys[li]]
        v_h = [value[hs:hs + head_dim] for value in values[li]]
        attn_logits = [sum(a * b for a, b in zip(q_h, k)) / math.sqrt(head_dim) for k in k_h]
        attn_weights = softmax(attn_logits)
        x_attn += [sum(w * v[j] for w, v in zip(attn_weights, v_h)) for j in range(head_dim)]
    return x_attn
