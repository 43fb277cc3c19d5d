"""Tables in Markdown, from rows of cells; the first row is the head."""


def table(rows):
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
