"""Imported once by the process that worker processes are forked from: what is slow the first time."""

import torch
import torch.distributed.tensor

import tests.fleet.toy_trainer  # noqa: F401  what a trainer's process needs
from tests.apply.toys import toy_applier
from tests.fleet.toy_worker import BF16, TOY, toy_weights

# One thread: those of a pool would not survive the fork.
torch.set_num_threads(1)
toy_applier(TOY.model(BF16, toy_weights(1)), TOY.info(BF16))
