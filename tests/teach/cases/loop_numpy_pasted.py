    # the text at once, as arrays
    outs = []
    for h in range(n_head):
        hs = h * head_dim
        q_h = q[:, hs:hs + head_dim]
        k_h = keys[:, hs:hs + head_dim]
        v_h = values[:, hs:hs + head_dim]
        attn_logits = q_h @ k_h.T / head_dim ** 0.5
        attn_logits[np.triu_indices(len(q), 1)] = -np.inf
        attn_weights = np.exp(attn_logits - attn_logits.max(axis=1, keepdims=True))
        attn_weights = attn_weights / attn_weights.sum(axis=1, keepdims=True)
        outs.append(attn_weights @ v_h)
    x_attn = np.concatenate(outs, axis=1)
