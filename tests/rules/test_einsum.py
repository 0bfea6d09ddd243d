"""Einsum up the ladder."""

from onnxgrad.testing import Case
from tests.rules.dtypes import dtypes
from tests.rules.ladder import ladder


def case(equation, *shapes, note="", **kwargs):
    return Case("Einsum", list(shapes), {"equation": equation}, note=f"{equation} {note}".strip(), **kwargs)


CASES = [
    case("ij,jk->ik", (2, 3), (3, 4)),
    case("bij, bjk -> bik", (2, 2, 3), (2, 3, 2)),
    case("ij,jk", (2, 3), (3, 4)),
    case("ba,ca", (2, 3), (2, 3), note="implicit order"),
    case("bhid,bhjd->bhij", (1, 2, 3, 2), (1, 2, 2, 2)),
    case("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)),
    case("...ij,...jk->...ik", (2, 1, 2, 3), (1, 2, 3, 2), note="broadcast"),
    case("...i->...", (2, 3)),
    case("i...,i...", (2, 3), (2, 3)),
    case("ii->i", (3, 3)),
    case("ii", (3, 3), note="trace"),
    case("iij->j", (2, 2, 3)),
    case("iji,jk->ik", (2, 3, 2), (3, 2)),
    case("iii->i", (3, 3, 3)),
    case("ij->", (2, 3)),
    case("ij->j", (2, 3)),
    case("ij,k->j", (2, 3), (2,)),
    case("i,j->ij", (2,), (3,)),
    case(",ij->ij", (), (2, 3)),
    case("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)),
    case("i,i,i->i", (3,), (3,), (3,)),
    case("ij->ji", (2, 3)),
    case("ij,ij->ij", (2, 3), (2, 3)),
    case("ij,jk->ik", (0, 3), (3, 2), note="empty"),
    case("ij,jk->ik", (2, 3), (3, 4), wrt=[1], note="one"),
]
test_rule = ladder("einsum", CASES)
test_dtype = dtypes(CASES)
