"""Convolutions for images: the Nature CNN, a small ResNet, or filters of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ludus.errors import ConfigError
from ludus.models.byte_scales import IMAGE_DIVISOR
from ludus.models.layers import is_tracing
from ludus.models.network_config import NetworkConfig

NATURE_FILTERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))


class ImageEncoder(nn.Module):
    """Convolutions over an image, channels first or last, uint8 divided by `divisor`; runs in channels-last layout."""

    def __init__(self, space: gym.spaces.Box, config: NetworkConfig, divisor: float = IMAGE_DIVISOR) -> None:
        super().__init__()
        self.channels_last_input = channels_last(space.shape)
        c, h, w = chw(space.shape)
        self.chw, self.pixels = (c, h, w), h * w
        self.scale = 1 / divisor if space.dtype == np.uint8 else 1.0
        if config.conv_filters is not None or config.conv == "nature":
            self.body: nn.Module = _convolutions(c, config.conv_filters or _fitting_filters(h, w))
        elif config.conv == "resnet":
            self.body = _resnet(c)
        else:
            raise ConfigError(f"model.conv is {config.conv!r}.", "Use 'nature' or 'resnet'.")
        self.body = self.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            with torch.no_grad():
                self.size = int(self.body(torch.zeros(1, c, h, w)).numel())
        except RuntimeError as error:
            raise ConfigError(f"The convolutions do not fit an image of {h}×{w}: {error}.", "Set model.conv_filters.") from error

    def to_network_layout(self, image: Tensor) -> Tensor:
        """[..., C, H, W] → [..., H, W, C] in memory, once, for images that are learned from several times.

        Transposing bytes costs a fifth of transposing the floats in every epoch.
        """
        return image if self.channels_last_input else _to_channels_last(image)

    def forward(self, image: Tensor) -> Tensor:
        lead = image.shape[:-3]
        x = image.flatten(0, -4) if len(lead) != 1 else image
        if tuple(image.shape[-3:]) != self.chw:
            x = x.permute(0, 3, 1, 2)
        elif image.dtype == torch.uint8 and not is_tracing():
            x = _to_channels_last(x).permute(0, 3, 1, 2)
        weight = next(self.body.parameters())
        x = x.to(weight.dtype, memory_format=torch.channels_last)
        x = self.body(x.mul_(self.scale) if image.dtype == torch.uint8 else x)
        features: Tensor = x.flatten(1).reshape(*lead, self.size)
        return features


def _to_channels_last(planes: Tensor) -> Tensor:
    """[…, C, H, W] → […, H, W, C], plane by plane: a third of the time of a general transposition of bytes."""
    out = planes.new_empty((*planes.shape[:-3], *planes.shape[-2:], planes.shape[-3]))
    for channel in range(planes.shape[-3]):
        out[..., channel] = planes[..., channel, :, :]
    return out


def channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether an image is [H, W, C]. A few planes with equal sides are [C, H, W]."""
    planes_first = shape[0] <= 16 and shape[1] == shape[2]
    return shape[-1] <= 16 and shape[-1] < shape[0] and not planes_first


def chw(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return (shape[2], shape[0], shape[1]) if channels_last(shape) else (shape[0], shape[1], shape[2])


def _fitting_filters(h: int, w: int) -> Sequence[tuple[int, int, int]]:
    return NATURE_FILTERS if min(h, w) >= 36 else ((16, 3, 1), (32, 3, 2)) if min(h, w) >= 7 else ((32, min(h, w, 2), 1),)


def _convolutions(channels: int, filters: Sequence[tuple[int, int, int]]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for out, kernel, stride in filters:
        conv = nn.Conv2d(channels, out, kernel, stride)
        nn.init.orthogonal_(conv.weight, math.sqrt(2))
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        layers += [conv, nn.ReLU(inplace=True)]
        channels = out
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + change


def _resnet(channels: int) -> nn.Sequential:
    """Three stages of 16, 32, 32 channels (Espeholt et al. 2018, the deep IMPALA network with one block per stage)."""
    layers: list[nn.Module] = []
    for out in (16, 32, 32):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), _Residual(out)]
        channels = out
    return nn.Sequential(*layers, nn.ReLU())
