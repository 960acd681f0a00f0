"""What the trainer decided about a transfer, written down before anybody acts on it."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

from vllm_sparse_refit.errors import TransactionError
from vllm_sparse_refit.trainer.durable import replace_durably
from vllm_sparse_refit.weight_version import WeightVersion

_FILE: Final = "decision.json"


class DecisionLog:
    """The latest decision, in a file if there is a folder for it, so that it survives the trainer.

    The decisions are ``commit`` (engines begin to write: each holds the base or the target), ``final``
    (all have written and verified: the target is the version, whoever is behind will be brought up) and
    ``abort`` (all go back to the base).

    Raises:
        TransactionError: the folder cannot be used.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._path = None if folder is None else Path(folder) / _FILE
        self.latest: dict[str, Any] | None = None
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self.latest = json.loads(self._path.read_text())
        except (OSError, ValueError) as error:
            raise TransactionError(
                f"the decisions in {str(self._path.parent)!r} cannot be read ({error}); mend or remove "
                "the file, or change SyncConfig.state_dir"
            ) from error

    @property
    def final(self) -> WeightVersion | None:
        """The version that the latest transfer led to, if it was decided that it is final."""
        if self.latest is None or self.latest["decision"] != "final":
            return None
        return WeightVersion(**self.latest["target"])

    def write(
        self, decision: str, transfer_id: str, base: WeightVersion, target: WeightVersion
    ) -> None:
        """Write a decision down; it is on the disk when this returns.

        Raises:
            TransactionError: it could not be written.
        """
        record = {
            "decision": decision,
            "transfer_id": transfer_id,
            "base": {"label": base.label, "digest": base.digest},
            "target": {"label": target.label, "digest": target.digest},
        }
        if self._path is not None:
            try:
                replace_durably(self._path, json.dumps(record).encode())
            except OSError as error:
                raise TransactionError(
                    f"the decision about transfer {transfer_id} could not be written to "
                    f"{str(self._path)!r} ({error}); free space or change SyncConfig.state_dir"
                ) from error
        self.latest = record

    def aborted(self, transfer_id: str) -> None:
        """Note that a transfer about which ``commit`` was written was taken back."""
        if self.latest is None or self.latest["transfer_id"] != transfer_id:
            return
        base, target = (WeightVersion(**self.latest[name]) for name in ("base", "target"))
        with contextlib.suppress(
            TransactionError
        ):  # without it the next trainer finds out by itself
            self.write("abort", transfer_id, base, target)
