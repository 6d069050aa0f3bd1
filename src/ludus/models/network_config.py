"""The `model:` section of an experiment, resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ludus.models.autoregressive_actions import Branch


@dataclass(frozen=True)
class NetworkConfig:
    """The `model:` section of an experiment, resolved."""

    fcnet_hiddens: tuple[int, ...] | None = None
    """Layers after the encoders; by default 64, 64 for vectors and 512 after a convolution."""
    fcnet_activation: str = "tanh"
    conv: str = "nature"
    """`nature` (three convolutions) or `resnet` (three small residual stages) for images."""
    conv_filters: tuple[tuple[int, int, int], ...] | None = None
    """Custom convolutions as (channels, kernel, stride); replaces `conv`."""
    entity_dim: int = 64
    entity_present: tuple[tuple[str, int], ...] = ()
    """Entity sets without a mask: name, and index of the feature that is above 0 for present entities."""
    autoregressive: tuple[Branch, ...] = ()
    """Parts of an action that are chosen after its first part (`ludus.models.autoregressive_actions`)."""
    vf_share_layers: bool | None = None
    """One trunk for policy and value; by default only for images and recurrent models."""
    core: str | None = None
    """None, `lstm` or `gru`."""
    cell_size: int = 128
    max_seq_len: int = 16
    free_log_std: bool = True
    """A learned standard deviation per action dimension that does not depend on the observation."""
    log_std_init: float = 0.0
    dueling: bool = False
    """Q-networks: separate streams for state value and advantages."""
    head_hiddens: tuple[int, ...] = ()
    """Q-networks: layers between the trunk and the outputs, one set per stream if dueling."""
    embed_above: int | None = None
    """Categories with more values than this are embedded instead of one-hot; None: never, as in checkpoints of earlier releases."""
    central: bool = False
    """The critic sees `state` in addition to `observation`, the policy only the latter (`ludus.models.centralized_critic`)."""
    central_shares: bool = False
    """The centralised critic takes features from the policy's layers."""
    custom_model: str | None = None
    """A user's model: the name of its file in `model/`, or `module:Class`."""
    custom_model_config: Mapping[str, Any] = field(default_factory=dict)
    byte_scales: tuple[tuple[str, float], ...] = ()
    """Path → divisor of the uint8 leaves of an observation that are not divided by 255 (`ludus.models.byte_scales`)."""

    def __post_init__(self) -> None:
        """Convert the plain mappings of a stored description to branches."""
        made = tuple(b if isinstance(b, Branch) else Branch(**{**b, "after": tuple(b["after"])}) for b in self.autoregressive)
        object.__setattr__(self, "autoregressive", made)
