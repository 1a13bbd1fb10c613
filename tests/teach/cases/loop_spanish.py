import math

n_cabezas = 4


def suavizar(fila):
    exps = [math.exp(a - max(fila)) for a in fila]
    return [e / sum(exps) for e in exps]


def atencion(consulta, claves, valores):
    ancho = len(consulta) // n_cabezas
    salida = []
    for h in range(n_cabezas):
        inicio = h * ancho
        q_h = consulta[inicio:inicio + ancho]
        k_h = [c[inicio:inicio + ancho] for c in claves]
        v_h = [v[inicio:inicio + ancho] for v in valores]
        puntos = [sum(a * b for a, b in zip(q_h, k)) / math.sqrt(ancho) for k in k_h]
        pesos = suavizar(puntos)
        salida.extend([sum(p * v[j] for p, v in zip(pesos, v_h)) for j in range(ancho)])
    return salida
