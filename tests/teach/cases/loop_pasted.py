    x_attn = []
    for h in range(n_head):
        hs = h * head_dim
        q_h = q[hs:hs + head_dim]
        k_h = [old[hs:hs + head_dim] for old in keys[li]]
        v_h = [old[hs:hs + head_dim] for old in values[li]]
        attn_logits = [sum(q_h[j] * key[j] for j in range(head_dim)) / head_dim ** 0.5 for key in k_h]
        attn_weights = softmax(attn_logits)
        head_out = [sum(attn_weights[t] * v_h[t][j] for t in range(len(v_h))) for j in range(head_dim)]
        x_attn.extend(head_out)
