"""Values that Python takes out of a tensor without naming a method: `float(x)`, `x[mask]`, `if x.any()`, found in
source text.

Only what the text says is known: a parameter or attribute that is annotated as a tensor, a result of `torch`, of a
tensor's method or of arithmetic with one. What may be an array or a number is left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

BOOLS = {
    "isfinite",
    "isnan",
    "isinf",
    "bool",
    "any",
    "all",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isclose",
    "logical_not",
}
"""Methods and functions of torch whose result is a tensor of bools."""
REDUCED = {"sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "norm", "prod", "std", "var", "median"}
TENSORS = BOOLS | REDUCED
TENSORS |= {"abs", "clamp", "exp", "log", "log1p", "expm1", "square", "sqrt", "sigmoid", "tanh", "neg", "where", "pow"}
TENSORS |= {
    "detach",
    "clone",
    "float",
    "double",
    "half",
    "long",
    "int",
    "to",
    "type_as",
    "contiguous",
    "requires_grad_",
}
TENSORS |= {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "expand",
    "transpose",
    "permute",
    "repeat",
}
TENSORS |= {"index_select", "index_add", "index_fill", "gather", "scatter", "scatter_add", "masked_fill", "cumsum"}
TENSORS |= {"log_softmax", "softmax", "logsumexp", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros"}
MAKERS = {
    "zeros",
    "ones",
    "full",
    "empty",
    "arange",
    "stack",
    "cat",
    "tensor",
    "as_tensor",
    "from_numpy",
    "minimum",
    "maximum",
}
"""Functions of torch, beside those that are methods too."""
PAIRS = {"max", "min", "median"}
"""With a dimension these return a pair."""


def annotated_attributes(trees: Iterable[ast.Module]) -> set[str]:
    """Names of attributes that are annotated as tensors in classes, and nowhere as anything else."""
    tensors: set[str] = set()
    others: set[str] = set()
    for tree in trees:
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    (tensors if _says_tensor(node.annotation) else others).add(node.target.id)
                if isinstance(node, ast.FunctionDef) and node.decorator_list:  # a property
                    returned = node.returns is not None and _says_tensor(node.returns)
                    (tensors if returned else others).add(node.name)
    return tensors - others


def takes(function: ast.FunctionDef, attributes: set[str]) -> Iterator[str]:
    """The expressions of a function that take values out of tensors, as text; `attributes`: names of those that are
    tensors."""
    known = _Known(function, attributes)
    for node in _own_nodes(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "int", "bool"):
            if node.args and known.is_tensor(node.args[0]):
                yield ast.unparse(node)
        elif isinstance(node, ast.Subscript):
            index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if known.is_tensor(node.value) and any(known.is_mask(one) for one in index):
                yield ast.unparse(node)
        elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            yield from (ast.unparse(part) for part in _conditions(node.test) if known.is_tensor(part))


def _conditions(test: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose truth a test asks for."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _conditions(part)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _conditions(test.operand)
    else:
        yield test


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it, which have names of their own."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda)
        ]


def _says_tensor(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).replace("Tensor | None", "Tensor") == "torch.Tensor"


class _Known:
    """The names of a function that are tensors, and those of them that are masks."""

    def __init__(self, function: ast.FunctionDef, attributes: set[str]) -> None:
        self.attributes = attributes
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.tensors = {a.arg for a in arguments if a.annotation is not None and _says_tensor(a.annotation)}
        self.masks: set[str] = set()
        assigned = [node for node in _own_nodes(function) if isinstance(node, ast.Assign)]
        values: dict[str, list[ast.expr]] = {}
        unknown: set[str] = set()
        for node in _own_nodes(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                unknown.add(node.id)
        for node in assigned:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
        # a name that is also set in another way (a loop, a tuple) may be anything
        stores = [n.id for n in _own_nodes(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        plain = {name: result for name, result in values.items() if stores.count(name) == len(result)}
        for _ in assigned:  # a value may come from names that are assigned before or after it in the text
            for name, result in plain.items():
                if all(map(self.is_tensor, result)):
                    self.tensors.add(name)
                    if all(map(self.is_mask, result)):
                        self.masks.add(name)
        self.tensors -= {name for name in unknown if name not in plain}

    def is_tensor(self, node: ast.expr) -> bool:
        """True for an expression that is a tensor, whatever its names that are not known are."""
        match node:
            case ast.Name(id=name):
                return name in self.tensors
            case ast.Attribute(attr=name):
                return name in self.attributes
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                return name in TENSORS | MAKERS and not (name in PAIRS and len(node.args) + len(node.keywords) > 1)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return (
                    name in TENSORS and not (name in PAIRS and (node.args or node.keywords)) and self.is_tensor(value)
                )
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.UnaryOp(op=operation, operand=value):
                return not isinstance(operation, ast.Not) and self.is_tensor(value)
            case ast.Compare(left=left, ops=operations, comparators=others):
                return not any(isinstance(o, ast.Is | ast.IsNot | ast.In | ast.NotIn) for o in operations) and any(
                    map(self.is_tensor, [left, *others])
                )
            case ast.Subscript(value=value):
                return self.is_tensor(value)
            case ast.IfExp(body=first, orelse=second):
                return self.is_tensor(first) and self.is_tensor(second)
        return False

    def is_mask(self, node: ast.expr) -> bool:
        """True for an expression that is a tensor of bools."""
        match node:
            case ast.Name(id=name):
                return name in self.masks
            case ast.Compare():
                return self.is_tensor(node)
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in BOOLS and self.is_tensor(node)
            case ast.UnaryOp(op=ast.Invert(), operand=value):
                return self.is_mask(value)
            case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
                return self.is_mask(left) or self.is_mask(right)
        return False
