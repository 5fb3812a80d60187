"""Upload of a run's model to the Hugging Face hub.

Sources: huggingface_hub 2.4, hf_api.py (`create_repo`, `create_commit`).
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from rlvr.core.own_files import numbered
from rlvr.distributed.checkpoint import is_sealed
from rlvr.errors import ConfigError, TrainingError
from rlvr.run.model_card import write_card
from rlvr.run.resolved_config import ResolvedConfig
from rlvr.run.run_folder import RunFolder
from rlvr.run.train_state import TrainState

MODEL_FILE = re.compile(
    r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|adapter_config\.json"
)
"""Files by which transformers and peft find a model's weights."""


def push(
    folder: RunFolder,
    resolved: ResolvedConfig,
    state: TrainState,
    repo: str,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Upload the model of the newest checkpoint of a run with its card, in one commit; its address.

    A whole model takes the place of weights of another one in the repository, which transformers might load instead:
    the commit removes them (the repository's history keeps them). No other file is removed.

    ConfigError without a token or a checkpoint, and for a name that is none, before anything is uploaded; TrainingError
    where the hub refuses it or cannot be reached.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not repo:
        raise ConfigError('push_to_hub: give the name of the repository, such as push_to_hub("owner/name")')
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push_to_hub: {repo!r} is no name of a repository (owner/name): {error}") from error
    if token is not None and not token.strip():
        raise ConfigError("push_to_hub: `token` is empty (an environment variable that is not set?)")
    if token is None and hub.get_token() is None:
        raise ConfigError(
            "push_to_hub: there is no token of the hub: run `hf auth login`, set HF_TOKEN, or give `token`; nothing "
            "was uploaded"
        )
    model = _newest_model(folder)
    api = hub.HfApi(token=token and token.strip())
    with TemporaryDirectory() as place:
        card = Path(place)
        try:
            made = api.create_repo(repo, private=private, exist_ok=True)
            # The name with its owner, which the hub adds to a bare one.
            name = made.repo_id
            write_card(folder, resolved, state, model, name, card)
            message = f"rlvr: step {state.step}"
            operations: list[hub.CommitOperationAdd | hub.CommitOperationDelete] = [
                hub.CommitOperationAdd(path_in_repo=str(path.relative_to(root)), path_or_fileobj=path)
                # peft writes a README.md of its own beside an adapter; the card takes its place.
                for root, path in [*_files(model, without="README.md"), *_files(card)]
            ]
            added = {operation.path_in_repo for operation in operations}
            # An adapter leaves weights beside it alone: they may be its base.
            if "adapter_config.json" not in added:
                stale = [path for path in api.list_repo_files(name) if MODEL_FILE.fullmatch(path)]
                operations += [hub.CommitOperationDelete(path) for path in stale if path not in added]
            api.create_commit(name, operations, commit_message=message)
        except _client_errors(HfHubHTTPError) as error:
            raise TrainingError(f"push_to_hub: {repo} could not be uploaded: {_problem(error)}") from error
    return str(made)


def _client_errors(of_hub: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors of an upload; `of_hub` is the hub's error of a request."""
    # Its bases: the base of all errors of the HTTP client, which differs between versions of huggingface_hub, and
    # OSError. A connection that is refused is the former alone.
    return (*(base for base in of_hub.__bases__ if issubclass(base, Exception)), OSError, ValueError)


def _problem(error: Exception) -> str:
    """The error of an upload in one line, with advice where the hub refused the token."""
    # The hub's errors have several lines, with the address of the request.
    problem = " ".join(str(error).split()) or type(error).__name__
    status = getattr(getattr(error, "response", None), "status_code", None)
    advice: dict[int | None, str] = {
        401: ". The hub does not know the token: give one that is valid (`hf auth login`, HF_TOKEN or `token`)",
        403: ". The token has no right to write there: give one with the role write, and a repository of its owner",
    }
    return problem.rstrip(".") + advice.get(status, "")


def _files(folder: Path, without: str = "") -> list[tuple[Path, Path]]:
    return [(folder, path) for path in sorted(folder.rglob("*")) if path.is_file() and path.name != without]


def _newest_model(folder: RunFolder) -> Path:
    """The folder of the model in the newest whole checkpoint. ConfigError where there is none."""
    saved = numbered(folder.checkpoints)
    for _, path in sorted(saved.items(), reverse=True):
        if is_sealed(path) and (path / "model").is_dir():
            return path / "model"
    raise ConfigError(f"push_to_hub: {folder.path} has no checkpoint yet: call train() or save() first")
