        x = rmsnorm(x)
        q = linear(x, state_dict['attn_wq'])
        k = linear(x, state_dict['attn_wk'])
        v = linear(x, state_dict['attn_wv'])
        keys.append(k)
        values.append(v)

        x_attn = []
        for h in range(n_head):
            hs = h * head_dim                    # where this head starts
            q_h = q[hs:hs + head_dim]
            k_h = [ki[hs:hs + head_dim] for ki in keys]
            v_h = [vi[hs:hs + head_dim] for vi in values]
            attn_logits = [sum(q_h[j] * k_h[t][j] for j in range(head_dim)) / math.sqrt(head_dim)
                           for t in range(len(k_h))]
            attn_weights = softmax(attn_logits)
            head_out = [sum(attn_weights[t] * v_h[t][j] for t in range(len(v_h)))
                        for j in range(head_dim)]
            x_attn.extend(head_out)
        x = linear(x_attn, state_dict['attn_wo'])
