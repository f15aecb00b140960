"""`rankwise plan --list-models` and `--guide`: the models known by name, and the guide to model sizes.

list_models(as_json=False)
show_guide("a100-80gb", as_json=False)
"""

import json

from flows.cli.plan.request import PLANNED
from flows.cli.tables import print_table


def list_models(as_json: bool) -> int:
    """Print all models known by name."""
    from engine.planner.catalog import known_models

    models = [(model, model.architecture) for model in known_models()]
    if as_json:
        found = [
            {
                "name": model.name,
                "repository": model.repository,
                "kind": architecture.kind,
                "model_type": architecture.model_type,
                "parameters": architecture.parameters,
            }
            for model, architecture in models
        ]
        print(json.dumps(found, indent=1))
        return PLANNED
    rows = [
        (model.name, architecture.kind.replace("_", "-"), architecture.model_type, model.repository,
         f"{architecture.parameters / 1e6:,.0f}")
        for model, architecture in models
    ]  # fmt: skip
    print_table(("model", "kind", "type", "repository", "million parameters"), rows, words=4)
    print("Other models: --model FOLDER, where FOLDER contains the model's config.json")
    return PLANNED


def show_guide(accelerator: str | None, as_json: bool) -> int:
    """Print the computed table of model sizes."""
    from dataclasses import asdict

    from configs.hardware.catalog import accelerator as named
    from engine.planner.guide import GUIDE_ACCELERATORS, guide_rows, guide_table

    tables = {name: guide_rows(named(name)) for name in ([accelerator] if accelerator else GUIDE_ACCELERATORS)}
    if as_json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in tables.items()}, indent=1))
        return PLANNED
    for number, (name, rows) in enumerate(tables.items()):
        header, cells = guide_table(rows)
        print(f"{'' if not number else chr(10)}Generation on {name}, published and predicted")
        print_table(header, cells)
        for row in rows:
            print(f"{row.size}: {' '.join(row.sentences)}")
    return PLANNED
