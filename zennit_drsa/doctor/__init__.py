def validate(*a, **k):
    pass


def doctor(*a, **k):
    pass
