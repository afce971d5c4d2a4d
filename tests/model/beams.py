"""Models without the beam_idx Gather, for tests and benchmarks of what it brings."""

from __future__ import annotations

import openvino as ov


def without_beams(model: ov.Model) -> ov.Model:
    """As some exporters write it: every cache is read directly. `model` is used up."""
    for read in [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]:
        for target in list(read.output(0).get_target_inputs()):
            gather = target.get_node()
            if gather.get_type_name() == "Gather":
                for after in list(gather.output(0).get_target_inputs()):
                    after.replace_source_output(read.output(0))
    rest = [p for p in model.get_parameters() if "beam_idx" not in p.output(0).get_names()]
    return ov.Model(model.get_results(), model.get_sinks(), rest, "without_beams")
