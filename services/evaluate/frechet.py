"""The Frechet distance between two sets of feature vectors: pure, float64, safe for few samples.

For Gaussians N(m1, S1) and N(m2, S2) it is |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1 S2)^(1/2) (Dowson and Landau 1982).
The last trace is taken without forming S1 S2: with S = F^T F, the square roots of the eigenvalues of S1 S2 are the
singular values of F1 F2^T. The factor F comes straight from the centred data by QR, so nothing is squared twice, a
covariance of low rank (fewer samples than features) needs no ridge, and a set against itself gives zero up to
rounding. Relative error about 1e-12; the order of samples changes nothing beyond that.

The estimate is biased upwards for few samples. Compare two distances only if all four sets have the same size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.evaluate.sums import Sums

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of a set of features, the latter as a factor."""

    mean: Matrix
    """[features]."""
    factor: Matrix
    """[rank, features], rank <= features: covariance = factor^T factor (unbiased, divided by samples - 1)."""


def fit(features: NDArray[np.floating]) -> Gaussian:
    """The Gaussian of [samples, features]; needs at least two samples, all finite."""
    values = np.asarray(features, dtype=np.float64)
    if values.ndim != 2 or len(values) < 2:
        raise ValueError(f"expected at least 2 samples as [samples, features], got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("features contain NaN or infinity")
    mean = values.mean(axis=0)
    centred = (values - mean) / np.sqrt(len(values) - 1)
    factor = np.asarray(np.linalg.qr(centred, mode="r"), dtype=np.float64)
    return Gaussian(mean=mean, factor=factor)


def of_sums(sums: Sums) -> Gaussian:
    """The Gaussian of exact sums: the same bits for the same samples, however they were grouped.

    The factor comes from the eigenvalues of the covariance, so directions without any spread are known to about 1e-8
    of the largest deviation, where `fit` knows them to 1e-16.
    """
    values, vectors = np.linalg.eigh(sums.covariance())
    return Gaussian(mean=sums.mean(), factor=np.sqrt(np.clip(values, 0.0, None))[:, None] * vectors.T)


def distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Frechet distance (what papers call FID), never negative."""
    if first.mean.shape != second.mean.shape:
        raise ValueError(f"feature widths differ: {first.mean.shape[0]} and {second.mean.shape[0]}")
    apart = float(((first.mean - second.mean) ** 2).sum())
    traces = float((first.factor**2).sum() + (second.factor**2).sum())
    shared = float(np.linalg.svd(first.factor @ second.factor.T, compute_uv=False).sum())
    return max(0.0, apart + traces - 2.0 * shared)


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Squared Frechet distance between two sets of [samples, features]."""
    return distance(fit(first), fit(second))
