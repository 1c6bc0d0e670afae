"""Which operators a backend takes: it is asked with programs of one operator, when a case needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from exir_lowering.testing.operators import DOMAINS, ROLES, Domain, Form, Operators
from exir_lowering.testing.program_cases import bind
from exir_lowering.testing.samples import Case, case, forget, take_sample
from exir_lowering.testing.trial import Broken, Subject, Unsupported, lower_case

_CLEAN, _FAULTY = 2, 1  # of an operator on which the backend fails, the cases say why, if there is no better one


@dataclass(frozen=True, slots=True)
class Choice:
    """The operators for the cases of one backend."""

    subject: Subject
    asked: dict[str, tuple[Operators, int]] = field(default_factory=dict)  # by domain, with how good they are
    taken: set[str] = field(default_factory=set)  # names of operators, which are tried first

    def fill(self, case: Case) -> tuple[Case, str]:
        """Return a case, made of what the backend takes, and what that is; Unsupported if it takes too little."""
        if case.fill is None:
            return case, ""
        best: tuple[Operators | None, int] = None, 0
        for domain in DOMAINS if not case.domains else (one for one in DOMAINS if one.name in case.domains):
            found, worth = self.asked.get(domain.name) or self._ask(domain)
            if worth > best[1] and all(any(getattr(found, role) for role in one.split("|")) for one in case.needs):
                best = found, worth
            if best[1] == _CLEAN * len(ROLES):
                break
        if best[0] is None:
            roles = {**ROLES, "grows": "an operator of any number of rows"}
            needed = " and ".join(" or ".join(roles[role] for role in needs.split("|")) for needs in case.needs)
            where = f" on {' or '.join(case.domains)} values" if case.domains else ""
            names = dict.fromkeys(found.names for found, _ in self.asked.values() if found.names)
            taken = "; ".join(names) or "none"
            raise Unsupported(f"it needs {needed}{where}; of what the suite knows, the backend takes {taken}")
        return replace(case, build=bind(case.fill, best[0])), best[0].names

    def _ask(self, domain: Domain) -> tuple[Operators, int]:
        """Find an operator for each role, and how many are taken without a fault."""
        chosen: dict[str, Form] = {}
        worth = 0
        for role in ROLES:
            found: dict[int, list[Form]] = {_CLEAN: [], _FAULTY: [], 0: []}
            for form in sorted(getattr(domain, role), key=lambda form: form[0] not in self.taken):
                if len(found[_CLEAN]) < (2 if role == "held" else 1) and len(found[_FAULTY]) < 3:
                    found[_is_taken(self.subject, _probe(domain, role, form))].append(form)
            self.taken.update(name for name, _ in found[_CLEAN])
            if good := found[_CLEAN] or found[_FAULTY]:
                worth += _CLEAN if found[_CLEAN] else _FAULTY
                chosen |= {role: good[0]} | ({"other": good[-1]} if role == "held" else {})
        names = (name if role in ("two", "one") else f"{name} with a weight" for role, (name, _) in chosen.items())
        functions = {role: function for role, (_, function) in chosen.items()}
        self.asked[domain.name] = Operators(domain, ", ".join(dict.fromkeys(names)), **functions), worth
        return self.asked[domain.name]


@cache
def _probe(domain: Domain, role: str, form: Form) -> Case:
    """Return a case of one operator."""
    name, function = form
    inputs = (domain.input("value"),) * (2 if role == "two" else 1)
    hold = {"w": Operators(domain).weight()} if role == "held" else {}
    return case(name, "", lambda m, *given: function(*given, *m.buffers()), *inputs, hold=lambda: hold)


def _is_taken(subject: Subject, probe: Case) -> int:
    """Return whether a backend takes all of a program of one operator, or fails, which counts as less."""
    try:
        methods = lower_case(subject, probe, take_sample(probe)).report.methods
    except Unsupported:
        return 0
    except Broken as broken:
        if broken.check in ("contract", "purity"):  # which may have changed it
            forget(probe)
        return _FAULTY
    mine = all(one.backend_id == subject.backend_id for method in methods for one in method.partitions)
    return _CLEAN if mine and all(method.delegated == len(method.nodes) for method in methods) else 0
