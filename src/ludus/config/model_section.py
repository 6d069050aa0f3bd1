"""The `model:` section: sizes and kinds of the default networks, or a custom network."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ludus.config.section import ConfigSection, PositiveInt, class_path, to_json


class BranchConfig(ConfigSection):
    """One entry of `model.autoregressive`: a part of an action that depends on the first part."""

    part: int = Field(ge=1, description="Index of a part of a MultiDiscrete action; part 0 is chosen first.")
    after: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=1, description="Options of the first part for which this part is chosen; each option has its own output."
    )
    points_at: str | None = Field(
        None, description="Entity list of the observation from which the part chooses one entry (a pointer)."
    )
    mask: str | None = Field(
        None, description="With points_at: key of the observation with the mask of valid entries, one row per option of `after`."
    )

    @model_validator(mode="after")
    def _check_mask(self) -> BranchConfig:
        if self.mask is not None and self.points_at is None:
            raise ValueError("mask requires points_at; other parts are masked by action_mask")
        return self


class ModelConfig(ConfigSection):
    """The `model:` section."""

    fcnet_hiddens: list[PositiveInt] | None = Field(None, description="Dense layers; null = 64, 64 (512 after convolutions).")
    fcnet_activation: Literal["tanh", "relu", "elu", "silu", "swish", "gelu", "linear"] = Field(
        "tanh", description="tanh, relu, elu, silu, gelu or linear."
    )
    conv: Literal["nature", "resnet"] = Field("nature", description="Convolutions for images: Nature CNN or a small ResNet.")
    conv_filters: list[tuple[PositiveInt, PositiveInt, PositiveInt]] | None = Field(
        None, description="Custom convolutions: [[channels, kernel, stride], …]."
    )
    entity_dim: int = Field(64, ge=1, description="Width of the encoder for lists of entities.")
    entity_present: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict,
        description="For entity lists without a <name>_mask: {name: index of the feature that is above 0 for present entities}.",
    )
    autoregressive: list[BranchConfig] = Field(
        default_factory=list,
        description="Autoregressive parts of a MultiDiscrete action: chosen after the first part and used only for some of its options: [{part, after, points_at, mask}, …].",
    )
    centralized_value: bool = Field(
        False,
        description="The observation is {observation, state}; the policy sees only the first part, the value function both (MAPPO).",
    )
    vf_share_layers: bool | None = Field(
        None,
        description="Share layers between policy and value; null = only for images and recurrent models, never with a centralised value.",
    )
    core: Literal["lstm", "gru"] | None = Field(None, description="Recurrent layer: lstm, gru or null.")
    use_lstm: bool = Field(False, description="Alias of core: lstm.")
    cell_size: int = Field(128, ge=1, description="Units of the recurrent layer.")
    max_seq_len: int = Field(16, ge=1, description="Sequence length for backpropagation through time.")
    free_log_std: bool = Field(True, description="Learn one standard deviation per continuous action, independent of the state.")
    log_std_init: float = Field(
        0.0, ge=-10, le=2, description="Initial log of that standard deviation; −1 explores less than half as widely as 0."
    )
    custom_model: Annotated[str | None, BeforeValidator(class_path)] = Field(
        None, description="Custom network: the name of its file in model/ (class CustomModel), or module:Class."
    )
    custom_model_config: Annotated[dict[str, Any], AfterValidator(to_json)] = Field(
        default_factory=dict, description="Keyword arguments of its constructor."
    )

    @model_validator(mode="after")
    def _check_sharing(self) -> ModelConfig:
        if self.vf_share_layers is False and (self.core or self.use_lstm):
            raise ValueError("a recurrent model shares its layers; leave out vf_share_layers: false")
        return self
