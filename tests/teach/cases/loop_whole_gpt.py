import math
import random
import urllib.request

names = urllib.request.urlopen('https://example.org/names.txt').read().split()


class Value:
    def __init__(self, data):
        self.data = data

    def __add__(self, other):
        return Value(self.data + (other.data if isinstance(other, Value) else other))

    def __mul__(self, other):
        return Value(self.data * (other.data if isinstance(other, Value) else other))

    def __pow__(self, power):
        return Value(self.data ** power)

    def exp(self):
        return Value(math.exp(self.data))

    def __neg__(self): return self * -1
    def __radd__(self, other): return self + other
    def __sub__(self, other): return self + (-other)
    def __rmul__(self, other): return self * other
    def __truediv__(self, other): return self * (other ** -1 if isinstance(other, Value) else 1 / other)


n_layer, n_embd, n_head = 1, 16, 4
head_dim = n_embd // n_head
state_dict = {f'layer0.attn_w{c}': [[Value(random.gauss(0, 0.08)) for _ in range(n_embd)] for _ in range(n_embd)] for c in 'qkvo'}


def linear(x, w):
    return [sum(wi * xi for wi, xi in zip(wo, x)) for wo in w]


def softmax(logits):
    top = max(val.data for val in logits)
    exps = [(val - top).exp() for val in logits]
    total = sum(exps)
    return [e / total for e in exps]


def gpt(token_id, pos_id, keys, values):
    x = [a + b for a, b in zip(state_dict['wte'][token_id], state_dict['wpe'][pos_id])]
    for li in range(n_layer):
        x_residual = x
        q = linear(x, state_dict[f'layer{li}.attn_wq'])
        k = linear(x, state_dict[f'layer{li}.attn_wk'])
        v = linear(x, state_dict[f'layer{li}.attn_wv'])
        keys[li].append(k)
        values[li].append(v)
        x_attn = []
        for h in range(n_head):
            hs = h * head_dim
            q_h = q[hs:hs + head_dim]
            k_h = [ki[hs:hs + head_dim] for ki in keys[li]]
            v_h = [vi[hs:hs + head_dim] for vi in values[li]]
            attn_logits = [sum(a * b for a, b in zip(q_h, k_t)) / head_dim ** 0.5 for k_t in k_h]
            attn_weights = softmax(attn_logits)
            for j in range(head_dim):
                x_attn.append(sum(w * v_t[j] for w, v_t in zip(attn_weights, v_h)))
        x = linear(x_attn, state_dict[f'layer{li}.attn_wo'])
        x = [a + b for a, b in zip(x, x_residual)]
    return linear(x, state_dict['lm_head'])


for step in range(1000):
    loss = gpt(0, 0, [[]], [[]])
