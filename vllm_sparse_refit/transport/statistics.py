"""Counters of one server."""

import logging
import threading
import time
from typing import Any, Final

# Below vLLM's own logger, so that lines come out in its format and with its worker prefix.
logger = logging.getLogger("vllm.sparse_refit.transport")

_LOG_INTERVAL_S: Final = 10.0


class Statistics:
    """Counters, with a lock. A rejection is logged, but a flood of them is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received = 0
        self._rejected = 0
        self._bytes = 0
        self._last_error: str | None = None
        self._logged_at = float("-inf")
        self._unlogged = 0

    def received(self, size: int) -> None:
        """Count a well-formed payload message of ``size`` bytes."""
        with self._lock:
            self._received += 1
            self._bytes += size

    def rejected(self, error: Exception) -> None:
        """Count, keep and perhaps log a refusal."""
        with self._lock:
            self._rejected += 1
            self._last_error = f"{type(error).__name__}: {error}"
            now = time.monotonic()
            if now - self._logged_at < _LOG_INTERVAL_S:
                self._unlogged += 1
                return
            unlogged, self._unlogged, self._logged_at = self._unlogged, 0, now
            message = self._last_error
        logger.warning("refused a payload: %s (%d more since the last line)", message, unlogged)

    def as_dict(self) -> dict[str, Any]:
        """All counters, as JSON types."""
        with self._lock:
            return {
                "payloads_received": self._received,
                "payloads_rejected": self._rejected,
                "bytes_received": self._bytes,
                "last_error": self._last_error,
            }
