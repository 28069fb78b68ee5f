"""Layers over the virtual stages of a pipeline."""

from bytescope.memory.errors import ReportError


def divide_layers(layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage: as even as can be, where they do not divide the first and the last lighter.

    Raises:
      ReportError: no layers, or fewer than virtual stages.
    """
    if layers < 1:
        raise ReportError(f"{layers} layers over a pipeline: give 1 or more layers")
    if layers < virtual_stages:
        raise ReportError(
            f"{layers} layers over {virtual_stages} virtual stages of a pipeline: give at most {layers} "
            "(mesh.stage times pipeline.virtual)"
        )
    least, more = divmod(layers, virtual_stages)
    # Those with a layer more: from the middle outwards, so that the ends, which wait longest, are the last to get one.
    middle = (virtual_stages - 1) / 2
    fuller = sorted(range(virtual_stages), key=lambda stage: (abs(stage - middle), stage))[:more]
    return tuple(least + (stage in fuller) for stage in range(virtual_stages))
