"""Spoken sentences with the times of their words, made by espeak-ng: sound whose alignment is known.

`spoken(n)` draws sentences of the little book for English, and of a small grammar for Spanish, and has them read by
several voices at several speeds. The library says when each word begins; nothing is measured or guessed. On Debian and
Ubuntu it is the package `espeak-ng`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwise.heads.texts import resampled

VOICES = {
    "en": ("gmw/en-US", "gmw/en+f3", "gmw/en-GB-scotland+m3", "gmw/en-US+f2", "gmw/en+m7", "gmw/en-029+f4"),
    "es": ("roa/es", "roa/es-419+f3", "roa/es+m3", "roa/es-419+f2", "roa/es+f4", "roa/es-419+m7"),
}
SPEEDS = (130, 150, 175, 200)  # words a minute
SUBJECTS = (
    "la vecina", "mi hermano", "el viejo maestro", "una niña pequeña", "el panadero del pueblo", "nuestra amiga Marta",
    "el perro negro", "la mujer del molino", "aquel hombre cansado", "tu abuela", "el médico nuevo", "la reina",
)  # fmt: skip
PREDICATES = (
    "compra pan y leche", "busca las llaves perdidas", "escribe una carta muy larga", "canta una canción alegre",
    "prepara la cena", "cuenta una historia antigua", "abre todas las ventanas", "limpia la mesa grande",
    "espera el tren del norte", "pinta la puerta de azul", "lee un libro sobre el mar", "cuida los caballos blancos",
)  # fmt: skip
PLACES = (
    "en la plaza", "cerca del río", "detrás de la iglesia", "en casa de su hermana", "junto al fuego", "en el jardín",
    "bajo los árboles", "delante de la escuela", "en la calle mayor", "sobre el puente viejo",
)  # fmt: skip
TIMES = (
    "por la mañana", "cada domingo", "antes de la lluvia", "todos los días", "al final del verano", "esta noche",
    "después de comer", "desde hace un año",
)  # fmt: skip


@dataclass(frozen=True)
class Speech:
    language: str
    voice: str
    speed: int
    words: tuple[str, ...]
    begins: tuple[float, ...]  # seconds at which each word begins
    samples: NDArray[np.float32]  # 16,000 a second


class SpeechError(Exception):
    """The voice is not there."""


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("message", ctypes.c_uint),
        ("place", ctypes.c_int),  # in the text, in characters from 1
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
END, WORD = 0, 1  # kinds of events
SYNCHRONOUS, UTF8, CHARACTERS, RATE = 2, 1, 1, 1


@cache
def _library() -> tuple[Any, int]:
    """The library, and its samples a second."""
    name = ctypes.util.find_library("espeak-ng")
    if name is None:
        raise SpeechError("espeak-ng is not installed, so there is no speech whose words have known times")
    library = ctypes.CDLL(name)
    return library, int(library.espeak_Initialize(SYNCHRONOUS, 500, None, 0))


def say(text: str, voice: str, speed: int) -> tuple[NDArray[np.float32], list[tuple[int, float]]]:
    """Samples at 16,000 a second, and the words: their place in the text, from 0, and when they begin, in seconds."""
    library, rate = _library()
    pieces: list[NDArray[np.int16]] = []
    words: list[tuple[int, float]] = []

    def take(wave: Any, count: int, events: Any) -> int:
        if count and wave:
            pieces.append(np.ctypeslib.as_array(wave, (count,)).copy())
        number = 0
        while events[number].type != END:
            if events[number].type == WORD:
                words.append((events[number].place - 1, events[number].milliseconds / 1000))
            number += 1
        return 0

    callback = _CALLBACK(take)
    library.espeak_SetSynthCallback(callback)
    if library.espeak_SetVoiceByName(voice.encode()):
        raise SpeechError(f"espeak-ng has no voice {voice}")
    library.espeak_SetParameter(RATE, speed, 0)
    content = text.encode()
    library.espeak_Synth(content, len(content) + 1, 0, CHARACTERS, 0, UTF8, None, None)
    return resampled(np.concatenate(pieces).astype(np.float32) / 2**15, rate), words


def sentences(language: str, count: int, rng: random.Random) -> list[str]:
    if language == "es":
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            who, what, where, when = (rng.choice(part) for part in (SUBJECTS, PREDICATES, PLACES, TIMES))
            drawn[f"{when} {who} {what} {where}" if rng.random() < 0.5 else f"{who} {what} {where} {when}"] = None
        return list(drawn)
    from headwise.files import packaged, read_text

    text = re.sub(r"\s+", " ", read_text(packaged("tale")))
    plain = [part.strip() for part in re.split(r"[.!?;:\"]", text) if re.fullmatch(r"[A-Za-z', ]+", part.strip())]
    return rng.sample(sorted({part for part in plain if 6 <= len(part.split()) <= 14}), count)


def spoken(count: int = 200, seed: int = 0) -> list[Speech]:
    """Half English, half Spanish. Sentence i of a language has voice i mod 6 and speed i mod 4."""
    rng = random.Random(seed)
    speeches: list[Speech] = []
    for language, voices in VOICES.items():
        whole = 0
        for number, text in enumerate(sentences(language, count, rng)):
            voice, speed = voices[number % len(voices)], SPEEDS[number % len(SPEEDS)]
            samples, events = say(text, voice, speed)
            starts = {match.start(): match.group() for match in re.finditer(r"\S+", text)}
            known = [(place, time) for place, time in events if place in starts]
            if len(known) == len(starts) and whole < count // 2:  # else the voice has joined two words
                whole += 1
                words, begins = tuple(starts.values()), tuple(time for _, time in known)
                speeches.append(Speech(language, voice, speed, words, begins, samples))
    return speeches
