"""Nim with one pile: a move takes 1, 2 or 3 stones, and whoever takes the last stone wins. See game.yaml.

The verifier plays the moves again, so that nothing which stands in the conversation has to be believed.
"""


def tasks():
    """Games by their first pile."""
    for pile in range(2, 11):
        yield {"prompt": [{"role": "user", "content": str(pile)}], "pile": pile}


def play(pile: int, moves: list[str]) -> tuple[int, float]:
    """Stones left after these moves and the program's answers, and the score of the first player."""
    for number, move in enumerate(moves):
        if move not in ("1", "2", "3") or int(move) > pile:
            return 0, 0.1 * min(number, 2)  # an illegal move loses; legal ones before it earn a little
        pile -= int(move)
        if pile == 0:
            return 0, 1.0
        pile -= 1  # the program always takes one stone
        if pile == 0:
            return 0, 0.1
    return pile, 0.1


class Nim:
    """The environment: each turn of the policy is a move, and the reply is the number of stones that are left."""

    def begin(self, task):
        """A new game."""
        return Game(task.info["pile"])


class Game:
    """One game."""

    def __init__(self, pile: int) -> None:
        self.pile = pile
        self.moves: list[str] = []

    def reply(self, text: str) -> str | None:
        """The stones that are left; None when the game is over."""
        self.moves.append(text)
        left, _ = play(self.pile, self.moves)
        return str(left) if left else None


def won(completion, pile):
    """1 for a game that was won. The turns of the policy stand on lines of their own."""
    return play(pile, completion.split("\n"))[1]
