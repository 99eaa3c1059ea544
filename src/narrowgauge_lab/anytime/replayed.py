"""A network's stages as CUDA graphs, driven like the network itself.

Launched operator by operator, a stage of a small network takes the host's time, not the GPU's. As a
graph it is one launch; who looks at a clock between stages (`deadline`) has its answers sooner, and
less that holds the host back falls within one.
"""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import torch

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.anytime.adaptive import require_capturable
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.stage_graphs import captured_in_turn, stage_names
from narrowgauge_lab.graphs import CaptureError

__all__ = ["ReplayedStages", "replayed_or_why"]


class ReplayedStages(AnytimeNetwork):
    """`net` in eval mode, captured for batches like `images` [B, C, H, W].

    Stages go from the first on, for the whole batch: it serves `deadline` and `forward`, not
    `adaptive`. Answers lie in tensors that the next pass overwrites. Weights are those that the
    network has when a stage is replayed, as long as they stay where they are.
    Raises CaptureError for a network that does what cannot be captured, NotApplicableError where
    there are no CUDA graphs, BadValueError for no images and for a network in training mode.
    """

    def __init__(self, net: AnytimeNetwork, images: torch.Tensor) -> None:
        require_capturable(net, images)
        super().__init__()
        self.exits, self.classes = net.exits, net.classes
        # Graphs read its weights where they lie, and keep nothing; yet they are not this one's.
        self._kept = (net,)
        self._images = images.clone()
        self._answers: Dict[int, Answer] = {}
        self._next = 0
        with torch.no_grad():
            self._graphs = captured_in_turn(
                stage_names(net.exits),
                images.device,
                lambda: self._pass(net),
                "deadline() takes any network",
            )
        self.eval()

    def begin(self, images: torch.Tensor) -> State:
        """See AnytimeNetwork. Raises BadValueError for images of another shape, type or device."""
        given, own = _kind(images), _kind(self._images)
        if given != own:
            raise BadValueError(
                f"images {given} for stages captured with {own}",
                next_step="capture them for such a batch too",
            )
        self._images.copy_(images)
        self._next = 0
        return (self._images,)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork; the head runs in any case. Raises BadValueError for a stage out of
        turn, and for a state that is not what `begin` gave."""
        self.require_exit(exit)
        if exit != self._next or not state or state[0] is not self._images:
            raise BadValueError(
                f"captured stage {exit} cannot run here",
                why="stages run one after another, for the whole batch that they were captured for",
                next_step="drive the network itself",
            )
        self._next += 1
        self._graphs[exit].replay()
        said = self._answers[exit]
        logits = said.logits if head else said.logits.new_zeros((said.logits.shape[0], 0))
        return Answer(logits, state, said.macs)

    def _pass(self, net: AnytimeNetwork) -> Callable[[int], None]:
        """What runs the stages and keeps their answers: held, nothing else is put there."""
        state: State = ()
        # Before anything is captured: what the pass before has said is not let go of meanwhile.
        self._answers = {}

        def stage(number: int) -> None:
            nonlocal state
            # What `begin` makes of the images has to be made anew by each replay.
            answer = net.advance(number, state if number else net.begin(self._images))
            state = answer.state
            self._answers[number] = Answer(answer.logits, (), answer.macs)

        return stage


def _kind(images: torch.Tensor) -> str:
    return f"{tuple(images.shape)} {images.dtype} on {images.device}"


def replayed_or_why(net: AnytimeNetwork, images: torch.Tensor) -> Tuple[AnytimeNetwork, str]:
    """The stages captured for batches like `images`; where they cannot be, the network itself. And
    what a record says of it, with the reason. Raises BadValueError as ReplayedStages does."""
    try:
        return ReplayedStages(net, images), "captured stages"
    except (CaptureError, NotApplicableError) as error:
        return net, f"launch by launch: {error.what}: {error.why}"
