"""Pushes an exported folder to the Hugging Face hub, or to what HF_ENDPOINT names in its place."""

from pathlib import Path
from typing import Any

from apprentice import extras
from apprentice.errors import BadInput, reason

FLAG, EXTRA = "push", ("hub", "huggingface_hub")


def check_repo(repo: str) -> None:
    """Raise BadInput if a repository can't have this name; Missing without the library."""
    extras.need(*EXTRA)
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise BadInput(FLAG, repo, f"a repository's name, as NAME/MODEL; {reason(error)}") from None


def push(folder: Path, repo: str, private: bool) -> str:
    """Make the repository, unless it is there, and commit the folder to it; return its address.

    Files of other names stay there, such as those of its owner.

    Raises:
        BadInput: the hub refuses, or does not answer.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api: Any = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as error:  # noqa: BLE001 - whatever the library makes of a refusal or a lost connection
        line = " ".join(str(error).split())[:200] or type(error).__name__
        expected = "a repository that a token may write (`hf auth login`, or HF_TOKEN), on a hub that answers"
        raise BadInput(FLAG, repo, f"{expected}; {type(error).__name__}: {line}") from None
    return str(address)
