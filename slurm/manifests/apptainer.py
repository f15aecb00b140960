"""The Apptainer definition of a server on top of the engine's image, or of the engine's image alone.

text = bundle_definition(served)         # apptainer build server.sif server.def
"""

import shlex

from slurm.manifests.serving import ContainedServer
from slurm.sbatch_bundle.scripts import image_definition as engine_definition


def bundle_definition(served: ContainedServer | None) -> str:
    """Return the text; the bundle's files lie in `model`, beside it."""
    text = engine_definition()
    if served is None:
        return text
    if served.model_in_image:
        text = text.replace("%files\n", "%files\n    model /bundle/model\n")
    command = shlex.join(served.command)
    return text.replace('    exec rankwise "$@"\n', f"    exec rankwise {command}\n")
