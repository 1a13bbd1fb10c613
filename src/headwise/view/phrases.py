"""The words of the steps of a head, in English and in Spanish."""

from __future__ import annotations

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "kicker": "One head, one position, step by step",
        "heading": "{head} at position {at}: {token}",
        "lede": "{model}. Layer {layer}, head {number}. Layers, heads, positions and features are counted from 0.",
        "rounding": "Every number here is rounded to {decimals} decimals: it stands for half a unit of the last "
        "decimal more or less. So a sum of n shown numbers may differ from the shown sum by (n + 1)/2 units of the "
        "last decimal, and the product of a and b by about (|a| + |b| + 1)/2. Given are q, k, v, W_O, x and what the "
        "other heads add; within that margin, every other line follows from those above it. Behind the rounding all "
        "is computed in double precision; --json gives it unrounded.",
        "text": "The text",
        "asked": "The question: what does this head do at position {at}? It may look at {seen} of {count} positions.",
        "legend": "→ the position asked about",
        "legend_hidden": "→ the position asked about; in parentheses, what it may not look at",
        "vectors": "The query and the keys",
        "query_is": "q is this head's slice of W_Q x at position {at}, where x is what the layer reads; k_j is the "
        "slice of W_K x of key/value head {kv} at each position j it may look at.",
        "shared": "Key/value head {kv} is read by the query heads {heads}.",
        "projected": "As projected:",
        "normed": "qk-norm: each vector divided by its r = √(sum of squares / {width} + {eps}), then multiplied by "
        "the gain, feature by feature:",
        "turned": "RoPE: features {pairs} turn together, (a, b) → (a cos - b sin, b cos + a sin), by an angle that "
        "grows with the position:",
        "some_features": "Of {width} features {shown} are shown; where a line needs the others, they stand as rest.",
        "some_keys": "Of {count} keys the {shown} with the largest weights are shown; the others stand as one line.",
        "some_heads": "Of {count} heads {shown} are shown; the others stand as one line.",
        "products": "Query times key",
        "products_are": "q_d k_jd, feature by feature; the sum of a line is the dot product q·k_j.",
        "scores": "Scale",
        "scaled": "{name} = q·k / √{width}",
        "scaled_by": "{name} = q·k · {scale}",
        "softcap": "{name} = {cap} tanh(score / {cap})",
        "bias_is": "logit = {before} + bias, which the mask adds by position",
        "softmax": "Softmax",
        "softmax_is": "The largest logit is {top}. shifted = logit - {top}; exp = e^shifted; weight = exp / total. "
        "The weights add up to 1.",
        "sink_is": "The sink is a learned logit, {sink}. It takes its share of the softmax and gives no value, so "
        "that the keys share {left}.",
        "values": "Weighted values",
        "values_are": "v_j is the slice of W_V x of key/value head {kv}:",
        "weighted_are": "Each value times its weight; their sum is the head's output:",
        "gate_is": "The head's output is then multiplied by its gate, {gate}.",
        "output": "Through W_O",
        "wo_is": "W_O has a block of columns for each head. Line c of this head's block, times the head's output, "
        "feature by feature and summed, is what the head adds to feature c:",
        "added_are": "So does every head, each with its own output and block. The sum of all lines is the layer's "
        "output. |·| is the length of a line: the root of its sum of squares.",
        "residual": "The residual stream",
        "residual_is": "What the layer was given, plus what its heads add:",
        "nothing": "The mask lets this position look at nothing, so that the head's output is 0.",
        "rest": "rest",
        "rest_squares": "rest²",
        "score": "score",
        "capped": "capped",
        "bias": "bias",
        "logit": "logit",
        "shifted": "shifted",
        "weight": "weight",
        "sum": "sum",
        "total": "total",
        "sink": "sink",
        "others": "others",
        "gain_q": "gain q",
        "gain_k": "gain k",
        "added": "added",
        "head": "head {number}",
        "layer_out": "layer",
        "before": "x",
        "new": "new x",
    },
    "es": {
        "kicker": "Una cabeza, una posición, paso a paso",
        "heading": "{head} en la posición {at}: {token}",
        "lede": "{model}. Capa {layer}, cabeza {number}. Capas, cabezas, posiciones y componentes se cuentan desde 0.",
        "rounding": "Cada número está redondeado a {decimals} decimales: representa media unidad del último decimal "
        "de más o de menos. Por eso la suma de n números mostrados puede diferir de la suma mostrada en (n + 1)/2 "
        "unidades del último decimal, y el producto de a y b en unas (|a| + |b| + 1)/2. Están dados q, k, v, W_O, x y "
        "lo que añaden las demás cabezas; dentro de ese margen, toda otra línea se obtiene de las anteriores. Detrás "
        "del redondeo todo se calcula en doble precisión; --json lo da sin redondear.",
        "text": "El texto",
        "asked": "La pregunta: ¿qué hace esta cabeza en la posición {at}? Puede mirar {seen} de {count} posiciones.",
        "legend": "→ la posición por la que se pregunta",
        "legend_hidden": "→ la posición por la que se pregunta; entre paréntesis, lo que no puede mirar",
        "vectors": "La consulta y las claves",
        "query_is": "q es la parte de esta cabeza en W_Q x en la posición {at}, donde x es lo que lee la capa; k_j es "
        "la parte de la cabeza de clave y valor {kv} en W_K x, en cada posición j que puede mirar.",
        "shared": "La cabeza de clave y valor {kv} la leen las cabezas de consulta {heads}.",
        "projected": "Tal como se proyectan:",
        "normed": "qk-norm: cada vector se divide por su r = √(suma de cuadrados / {width} + {eps}) y luego se "
        "multiplica por la ganancia, componente a componente:",
        "turned": "RoPE: las componentes {pairs} giran juntas, (a, b) → (a cos - b sin, b cos + a sin), con un ángulo "
        "que crece con la posición:",
        "some_features": "De {width} componentes se muestran {shown}; donde una línea necesita las demás, figuran como "
        "resto.",
        "some_keys": "De {count} claves se muestran las {shown} de mayor peso; las demás figuran en una sola línea.",
        "some_heads": "De {count} cabezas se muestran {shown}; las demás figuran en una sola línea.",
        "products": "Consulta por clave",
        "products_are": "q_d k_jd, componente a componente; la suma de una línea es el producto escalar q·k_j.",
        "scores": "Escala",
        "scaled": "{name} = q·k / √{width}",
        "scaled_by": "{name} = q·k · {scale}",
        "softcap": "{name} = {cap} tanh(puntuación / {cap})",
        "bias_is": "logit = {before} + sesgo, que la máscara suma según la posición",
        "softmax": "Softmax",
        "softmax_is": "El mayor logit es {top}. desplazado = logit - {top}; exp = e^desplazado; peso = exp / total. "
        "Los pesos suman 1.",
        "sink_is": "El sumidero es un logit aprendido, {sink}. Toma su parte del softmax y no aporta valor, de modo "
        "que las claves se reparten {left}.",
        "values": "Valores ponderados",
        "values_are": "v_j es la parte de la cabeza de clave y valor {kv} en W_V x:",
        "weighted_are": "Cada valor por su peso; la suma es la salida de la cabeza:",
        "gate_is": "La salida de la cabeza se multiplica después por su compuerta, {gate}.",
        "output": "A través de W_O",
        "wo_is": "W_O tiene un bloque de columnas para cada cabeza. La línea c del bloque de esta cabeza, multiplicada "
        "componente a componente por la salida de la cabeza y sumada, es lo que la cabeza añade a la componente c:",
        "added_are": "Lo mismo hace cada cabeza, con su propia salida y su bloque. La suma de todas las líneas es la "
        "salida de la capa. |·| es la longitud de una línea: la raíz de su suma de cuadrados.",
        "residual": "La corriente residual",
        "residual_is": "Lo que recibió la capa, más lo que añaden sus cabezas:",
        "nothing": "La máscara no deja mirar nada a esta posición, así que la salida de la cabeza es 0.",
        "rest": "resto",
        "rest_squares": "resto²",
        "score": "puntuación",
        "capped": "acotada",
        "bias": "sesgo",
        "logit": "logit",
        "shifted": "desplazado",
        "weight": "peso",
        "sum": "suma",
        "total": "total",
        "sink": "sumidero",
        "others": "las demás",
        "gain_q": "ganancia q",
        "gain_k": "ganancia k",
        "added": "añade",
        "head": "cabeza {number}",
        "layer_out": "capa",
        "before": "x",
        "new": "nueva x",
    },
}
