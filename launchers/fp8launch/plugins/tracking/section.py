"""The section `tracking` of a recipe or a cluster profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from fp8launch.diagnostics import UserError
from fp8launch.recipe.field_types import matching
from fp8launch.recipe.schema import Recipe, section_of
from fp8launch.recipe.sections import Section
from fp8launch.recipe.validation_problems import validation_problems
from fp8launch.recipe.yaml_source import Node

if TYPE_CHECKING:
    # Every recipe imports this module; only jobs need profiles.
    from fp8launch.cluster.profile import Cluster

TrackerName = Annotated[str, matching(r"^[^\x00-\x1f\x7f/\\#?%:]{1,128}$", "1 to 128 characters without / \\ # ? % :")]
# A login in front of the host, or a key in the query.
_LOGIN = re.compile(r"//[^/]*@|[?&][^=]*(?:token|key|password|secret)[^=]*=", re.IGNORECASE)


class Wandb(Section):
    project: TrackerName | None = Field(default=None, description="by default the study's name, or fp8launch")
    entity: TrackerName | None = Field(default=None, description="user or team; by default the account's")
    group: TrackerName | None = Field(default=None, description="by default the study's name")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline writes files for `wandb sync`, where nodes have no network"
    )


class Mlflow(Section):
    uri: str | None = Field(default=None, description="server or database; by default MLFLOW_TRACKING_URI in the job")
    experiment: TrackerName | None = Field(default=None, description="by default the study's name, or fp8launch")

    @field_validator("uri")
    @classmethod
    def _without_login(cls, uri: str | None) -> str | None:
        if uri is not None and _LOGIN.search(uri):
            raise ValueError(
                "the address contains a login, which would be written to files",
                "remove it, and export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )
        return uri


class TensorBoard(Section):
    dir: str | None = Field(default=None, description="absolute folder; by default `tensorboard` in the run folder")

    @field_validator("dir")
    @classmethod
    def _is_absolute(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.startswith("/"):
            raise ValueError("must be an absolute path", "write the whole path, or remove `dir`")
        return folder


class Tracking(Section):
    """Trackers that the run is logged to while it runs (docs/tracking.md). `wandb: {}` uses W&B with its defaults."""

    wandb: Wandb | None = None
    mlflow: Mlflow | None = None
    tensorboard: TensorBoard | None = None
    python: str | None = Field(
        default=None,
        description="Python on the first node with the W&B and MLflow libraries; by default the job's own if it has "
        "them and there is no container, else the Python that runs fp8launch",
    )

    @property
    def trackers(self) -> dict[str, dict[str, Any]]:
        """The settings of each tracker that is on."""
        stated = {"wandb": self.wandb, "mlflow": self.mlflow, "tensorboard": self.tensorboard}
        return {name: section.model_dump() for name, section in stated.items() if section is not None}


def tracking_of(recipe: Recipe) -> Tracking:
    """Return what the recipe itself states."""
    return section_of(recipe, "tracking", Tracking)


def tracking_in(recipe: Recipe, cluster: Cluster) -> Tracking:
    """Return the recipe's settings over the cluster profile's. Null in a recipe turns a tracker of the profile off.

    Raises UserError if the profile is wrong.
    """
    if not cluster.tracking:
        return tracking_of(recipe)
    _validated(cluster.tracking)
    return _validated(_merged(cluster.tracking, tracking_of(recipe).model_dump(exclude_unset=True)))


def _validated(settings: Mapping[str, Any]) -> Tracking:
    try:
        return Tracking.model_validate(settings)
    except ValidationError as exc:
        raise UserError(validation_problems(Tracking, _node(settings), exc)) from None


def _node(value: Any) -> Node:
    if isinstance(value, Mapping):
        value = {name: _node(child) for name, child in value.items()}
    return Node(value, "cluster profile: tracking")


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(under)
    for name, value in over.items():
        old = found.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        found[name] = value
    return found
