"""Sound as samples, 16,000 a second, which models of speech read."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headwise.errors import HeadwiseError

RATE = 16_000  # samples a second
WIDTHS = {2: (np.int16, 2**15), 4: (np.int32, 2**31)}  # bytes of a sample: its type, and the full scale


def read_wav(path: Path) -> NDArray[np.float32]:
    """The samples of a WAV file (PCM of 16 or 32 bits), its channels averaged. Raises HeadwiseError for others."""
    if not path.is_file():
        raise HeadwiseError(f"{path} is no file")
    try:
        with wave.open(str(path)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise HeadwiseError(f"{path} is no WAV file that can be read: {error}") from None
    if width not in WIDTHS:
        raise HeadwiseError(f"{path} has samples of {8 * width} bits; write it with 16")
    kind, full_scale = WIDTHS[width]
    samples = np.frombuffer(content, kind).reshape(-1, channels).mean(1) / full_scale
    return resampled(samples.astype(np.float32), rate)


def resampled(samples: NDArray[np.float32], rate: int, to: int = RATE) -> NDArray[np.float32]:
    """The same sound at another number of samples a second, band-limited by its spectrum."""
    if rate == to:
        return samples
    seconds = -(-len(samples) // rate) + 1  # whole ones, for a whole length; one of silence keeps the ends apart
    spectrum = np.fft.rfft(np.pad(samples, (0, seconds * rate - len(samples))))
    kept = np.zeros(seconds * to // 2 + 1, complex)
    size = min(len(kept), len(spectrum))
    kept[:size] = spectrum[:size]
    sound = np.fft.irfft(kept, seconds * to) * (to / rate)
    return sound[: round(len(samples) * to / rate)].astype(np.float32)
