"""What a life may contain, and where: the generator and the shrinker keep to it, so that a smaller program is legal, too."""

from __future__ import annotations

from differential.program import Op, Program

# Writes of which no version, address or optimizer tells.
QUIET = ("data", "together", "numpy", "dlpack", "collective")
FORWARDS = ("forward", "evaluate", "fail", "checked")
BETWEEN_GRAPHS = (
    *("step", "write", "average", "load", "train_parameters", "checkpoint", "rebuild"),
    *("checked", "export"),
)


class Rules:
    """Of one model's life so far.

    What docs/use/python-guide.md says of writes decides: to whole parameters that modules show they are lost; quiet ones are not
    noticed where the user keeps whole parameters by an option.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graphs: set[str] = set()
        self.saved: set[str] = set()
        self.synchronizes = True
        self.unsynchronized = False  # Gradients wait for a synchronization.
        self.has_gradients = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """The model is a new one."""
        options = self.program.options
        # Megatron-FSDP keeps the parameters that are in no unit.
        self.keeps = (
            options.front == "megatron"
            or options.keep_gathered_bytes > 0
            or options.memory_budget > 0
            or any(unit.reshard_after_forward is False for unit in self.program.units)
        )
        self.has_neighbours = any(type(unit.reshard_after_forward) is int for unit in self.program.units)
        self.keeps_after_backward = False
        self.pinned: set[str] = set()
        self.fresh = True  # No forward since shards were last known to have changed.
        self.shows_whole = False
        self.written = False  # Since modules show whole parameters.
        self.has_shared = False

    @property
    def stays_gathered(self) -> bool:
        """The user has asked for whole parameters that stay beyond backward."""
        return bool(self.pinned) or self.keeps_after_backward

    def may(self, op: Op) -> bool:
        """Whether the operation may come now."""
        what, arguments = op.what, op.arguments
        if what == "backward":
            return arguments["graph"] in self.graphs
        if what in BETWEEN_GRAPHS and self.graphs:
            return False
        if what in ("step", "zero_grad", "fail", "clip") and self.unsynchronized:
            return False
        if what == "load":
            return arguments["slot"] in self.saved and not (
                arguments["assign"] and (self.stays_gathered or self.shows_whole)
            )
        if what == "average":
            return self._may_write("together")
        if what == "read":
            # After a forward, modules show what neighbours keep: smaller parts, of other ranks.
            return not self.stays_gathered and not (self.shows_whole and (self.written or self.has_neighbours))
        if what == "write":
            return self._may_write(arguments["how"])
        # A GradScaler must have seen gradients when it steps.
        scaled = self.program.optimizer.scaler
        if what in ("step", "clip") and scaled:
            return self.has_gradients
        return what != "rebuild" or not (scaled and self.has_gradients)

    def _may_write(self, how: str) -> bool:
        if how == "shown":
            return not (self.stays_gathered or self.shows_whole)
        # The first exchange of memory changes an address; what is written to shared memory later is quiet.
        if how in QUIET or (how == "shared" and self.has_shared):
            return not self.stays_gathered and (not self.keeps or self.fresh)
        return how != "shared" or not self.stays_gathered

    def note(self, op: Op) -> None:
        """The operation comes now."""
        what, arguments = op.what, op.arguments
        if what in FORWARDS:
            self.fresh = False
            self.shows_whole = self.keeps or arguments.get("mode", "grad") == "grad"
            self.written = False
        if what == "forward":
            self.graphs.add(arguments["graph"])
        elif what in ("backward", "checked"):
            if what == "backward" and not arguments.get("retain"):
                self.graphs.discard(arguments["graph"])
            self.unsynchronized = not self.synchronizes
            self.has_gradients = True
            self.shows_whole, self.written = self.stays_gathered, False
        elif what == "save":
            self.saved.add(arguments["slot"])
        elif what == "start_param_sync":
            self.shows_whole, self.written = True, False
            self.fresh = False
        elif what in ("write", "average", "step", "load"):
            if what == "step" and self.program.options.front == "megatron":  # It shows shards.
                self.shows_whole = False
            self.written = True
            self.fresh = self.fresh or what == "step"
            if arguments.get("assign"):
                self.has_gradients = False
            self.has_shared = self.has_shared or arguments.get("how") == "shared"
        elif what == "zero_grad":
            self.has_gradients = self.has_gradients and not arguments["set_to_none"]
        elif what == "rebuild":
            self.has_gradients = False
            self.begin_anew()
        elif what == "call":
            self._note_call(arguments["node"], arguments["method"], arguments["arguments"])

    def _note_call(self, node: str, method: str, arguments: dict[str, bool]) -> None:
        if method == "set_requires_gradient_sync":
            self.synchronizes = arguments["requires_gradient_sync"]
        elif method == "set_reshard_after_forward":
            self.keeps = self.keeps or not arguments["reshard_after_forward"]
        elif method == "set_reshard_after_backward":
            self.keeps_after_backward = not arguments["reshard_after_backward"]
        elif method == "unshard":
            self.pinned.add(node)
            self.fresh = False
        elif method == "reshard":
            self.pinned.discard(node)


def legal(program: Program) -> bool:
    """Each operation may come where it comes."""
    rules = [Rules(program) for _ in range(program.models)]
    for op in program.operations:
        if not rules[op.model].may(op):
            return False
        rules[op.model].note(op)
    return bool(program.operations)
