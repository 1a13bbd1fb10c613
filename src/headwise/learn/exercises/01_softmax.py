import math


def dot(a, b):
    """The sum of a[i] * b[i]."""
    return sum(x * y for x, y in zip(a, b))  #?


def softmax(scores):
    """Weights of the scores: positive, and their sum is 1."""
    top = max(scores)  # taken from every score, so that exp cannot overflow; it cancels in the ratio
    powers = [math.exp(score - top) for score in scores]  #?
    return [power / sum(powers) for power in powers]  #?
