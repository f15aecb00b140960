"""Names in the catalog, and the spellings that mean them: any case, aliases, as a driver prints them."""

import re

from configs.hardware.catalog_layers import Tables


def spellings(tables: Tables, table: str) -> dict[str, list[str]]:
    """Every spelling of a name, plain, and the names that it can mean; a name itself means nothing else."""
    found: dict[str, list[str]] = {}
    for name, figures in tables[table].items():
        aliases = str(figures["aliases"].value).split(";") if "aliases" in figures else []
        if table == "instances":
            aliases.append(name.partition("/")[2])
            aliases += [name.partition("/")[2].removeprefix("Standard_")] if "/Standard_" in name else []
        for spelling in dict.fromkeys(plain_name(alias) for alias in aliases if alias.strip()):
            names = found.setdefault(spelling, [])
            names += [name] if name not in names else []
    return found | {plain_name(name): [name] for name in tables[table]}


def plain_name(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` and `nvidia-h100-80gb-hbm3` alike, without the maker's name."""
    plain = re.sub(r"[\s_-]+", "-", name.strip().lower())
    return re.sub(r"^(nvidia-|amd-|intel(\(r\))?-|instinct-|tesla-|geforce-)+", "", plain)


def instance_name(name: str, attached: tuple[int, str] | None) -> str:
    """An instance with what is attached to it, as `gcp/n1-standard-8+2xt4`."""
    if attached is None:
        return name
    count, device = attached
    return f"{name}+{count}x{device}" if count > 1 else f"{name}+{device}"


def by_known_names(added: Tables, below: Tables, file: str) -> Tables:
    """The user's entries under the names that they mean: `h100` there is our `h100-80gb`, not another device."""
    renamed: Tables = {table: {} for table in added}
    for table, entries in added.items():
        known = spellings(below, table)
        for name, figures in entries.items():
            meant = known.get(plain_name(name), [name])
            if len(meant) > 1:
                raise ValueError(f"{file}: {table}.{name} is ambiguous; use one of: {', '.join(meant)}")
            parts = meant[0].split("/")
            sound = len(parts) == 2 and "+" not in meant[0] and all(part and part == part.strip() for part in parts)
            if table == "instances" and not sound:
                raise ValueError(f"{file}: instances.{name}: expected provider/instance, such as lab/rack-7")
            renamed[table][meant[0]] = {**renamed[table].get(meant[0], {}), **figures}
    return renamed
