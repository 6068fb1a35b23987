"""The two PyTorch networks; nothing else imports PyTorch. Inputs, outputs and weights are NumPy arrays.

PyTorch's global random state is not used: initial weights and batch order come from NumPy generators, so networks
fitted in concurrent threads are bit-identical to those fitted alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.config import THREADS

Weights = dict[str, np.ndarray]
"""Weights of a network by PyTorch's names, float32."""

_SCORING_BATCH = 512


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Architecture of a network.

    ``kind``: ``lstm`` (one layer, last state) or ``cnn1d`` (three blocks of convolution of width 5, ReLU and max
    pooling by two, then the average over time and a dense layer). Both output one log-odds.
    """

    kind: str
    inputs: int
    hidden: int
    filters: int


@dataclass(frozen=True, slots=True)
class FitSchedule:
    """Training schedule (AdamW on the weighted binary cross-entropy).

    ``epochs``: the maximum if there is a tail.
    ``patience``: epochs without a lower loss on the tail before early stopping; the best epoch's weights are kept.
    """

    learning_rate: float
    weight_decay: float
    batch_size: int
    epochs: int
    patience: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """Network inputs of rows: shapes (n, steps, values per step) and (n, statics)."""

    window: np.ndarray
    static: np.ndarray
    label: np.ndarray
    weight: np.ndarray


def fit_network(
    shape: NetworkShape, rows: Inputs, tail: Inputs | None, schedule: FitSchedule, *, seed: int
) -> tuple[Weights, int]:
    """Fit a network; return the weights of the best epoch and its number.

    ``tail``: later rows for early stopping; None: run all epochs.
    """
    random = np.random.default_rng(seed)
    with _deterministic():
        network = _Network(shape)
        _draw_weights(network, random, _log_odds_of(rows))
        window, static = torch.from_numpy(rows.window), torch.from_numpy(rows.static)
        label = torch.from_numpy(rows.label)
        weight = torch.from_numpy((rows.weight / rows.weight.mean()).astype(np.float32))
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay, foreach=False
        )
        best, best_loss, best_epoch = _weights(network), math.inf, 0
        for epoch in range(1, schedule.epochs + 1):
            network.train()
            order = random.permutation(len(rows.label))
            for begin in range(0, len(order), schedule.batch_size):
                batch = torch.from_numpy(order[begin : begin + schedule.batch_size])
                optimizer.zero_grad(set_to_none=True)
                loss = nn.functional.binary_cross_entropy_with_logits(
                    network(window[batch], static[batch]), label[batch], weight=weight[batch]
                )
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
            if tail is None:
                best, best_epoch = _weights(network), epoch
                continue
            tail_loss = _loss(network, tail)
            if tail_loss < best_loss:
                best, best_loss, best_epoch = _weights(network), tail_loss, epoch
            elif epoch - best_epoch >= schedule.patience:
                break
        return best, best_epoch


def network_log_odds(
    shape: NetworkShape,
    weights: Mapping[str, np.ndarray],
    inputs: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
    rows: int,
) -> np.ndarray:
    """Score rows in batches of some hundreds, so that activations stay in the cache.

    ``inputs``: maps (begin, end) to windows and static features, so that rows can be scaled in blocks.
    """
    out = np.empty(rows)
    with _deterministic(), torch.no_grad():
        network = _Network(shape)
        network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})
        network.eval()
        for begin in range(0, rows, _SCORING_BATCH):
            end = min(begin + _SCORING_BATCH, rows)
            window, static = inputs(begin, end)
            out[begin:end] = network(torch.from_numpy(window), torch.from_numpy(static)).numpy()
    return out


def weight_shapes(shape: NetworkShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's weights, by PyTorch's names."""
    return {name: tuple(value.shape) for name, value in _Network(shape).state_dict().items()}


class _Network(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.kind = shape.kind
        with torch.device("meta"):  # weights are drawn or loaded, never initialized by PyTorch
            if shape.kind == "lstm":
                self.lstm = nn.LSTM(shape.inputs, shape.hidden, batch_first=True)
            else:
                widths = (shape.inputs, shape.filters, shape.filters)
                self.convolutions = nn.ModuleList(
                    nn.Conv1d(width, shape.filters, kernel_size=5, padding=2) for width in widths
                )
                self.dense = nn.Linear(shape.filters, shape.hidden)
            self.out = nn.Linear(shape.hidden, 1)
        self.to_empty(device="cpu")

    def forward(self, window: Tensor, static: Tensor) -> Tensor:
        repeated = static.unsqueeze(1).expand(-1, window.shape[1], -1)
        steps = torch.cat([window, repeated], dim=2)
        if self.kind == "lstm":
            _, (last, _) = self.lstm(steps)
            return self.out(last[-1]).squeeze(1)
        activations = steps.transpose(1, 2)
        for convolution in self.convolutions:
            activations = nn.functional.max_pool1d(torch.relu(convolution(activations)), 2, ceil_mode=True)
        return self.out(torch.relu(self.dense(activations.mean(dim=2)))).squeeze(1)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Fix the number of threads and the algorithms, which affect the last bits."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw_weights(network: _Network, random: np.random.Generator, log_odds: float) -> None:
    """Initialize weights as PyTorch does (uniform within 1 / sqrt(fan in)); the output bias is the base rate."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            hidden = network.lstm.hidden_size if name.startswith("lstm.") else 0
            if weight.ndim > 1:
                fan_in = hidden or int(np.prod(weight.shape[1:]))
            bound = 1 / math.sqrt(fan_in)
            weight.copy_(torch.from_numpy(random.uniform(-bound, bound, tuple(weight.shape)).astype(np.float32)))
            if name == "lstm.bias_ih_l0":  # forget-gate bias 1: gradients cannot restore forgotten state
                weight[hidden : 2 * hidden] = 1.0
        network.out.bias.fill_(log_odds)


def _log_odds_of(rows: Inputs) -> float:
    positive = float(rows.weight[rows.label == 1].sum())
    return math.log(positive / max(float(rows.weight.sum()) - positive, 1e-9)) if positive > 0 else 0.0


def _loss(network: _Network, tail: Inputs) -> float:
    network.eval()
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(tail.label), _SCORING_BATCH):
            part = slice(begin, begin + _SCORING_BATCH)
            total += float(
                nn.functional.binary_cross_entropy_with_logits(
                    network(torch.from_numpy(tail.window[part]), torch.from_numpy(tail.static[part])),
                    torch.from_numpy(tail.label[part]),
                    weight=torch.from_numpy(tail.weight[part]),
                    reduction="sum",
                )
            )
    return total


def _weights(network: Any) -> Weights:
    return {name: value.detach().numpy().copy() for name, value in network.state_dict().items()}
