import torch
import torch.nn as nn


class AtencionMultiCabeza(nn.Module):
    """Atención causal de varias cabezas."""

    def __init__(self, d_modelo, n_cabezas, dropout=0.0):
        super().__init__()
        self.n_cabezas = n_cabezas
        self.dim_cabeza = d_modelo // n_cabezas
        self.W_consulta = nn.Linear(d_modelo, d_modelo)
        self.W_clave = nn.Linear(d_modelo, d_modelo)
        self.W_valor = nn.Linear(d_modelo, d_modelo)
        self.salida = nn.Linear(d_modelo, d_modelo)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        lote, largo, ancho = x.shape
        forma = (lote, largo, self.n_cabezas, self.dim_cabeza)
        consultas = self.W_consulta(x).view(forma).transpose(1, 2)
        claves = self.W_clave(x).view(forma).transpose(1, 2)
        valores = self.W_valor(x).view(forma).transpose(1, 2)
        puntajes = consultas @ claves.transpose(-2, -1) / self.dim_cabeza ** 0.5
        futuro = torch.ones(largo, largo, dtype=torch.bool).triu(1)
        puntajes = puntajes.masked_fill(futuro, float("-inf"))
        pesos = self.dropout(puntajes.softmax(dim=-1))
        contexto = (pesos @ valores).transpose(1, 2).reshape(lote, largo, ancho)
        return self.salida(contexto)
