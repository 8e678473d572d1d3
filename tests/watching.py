"""A watcher of sweeps that says nothing and remembers everything."""


class Quiet:
    def __init__(self):
        self.asked, self.found, self.names, self.broken, self.left_out = [], 0, [], [], []

    def wanted(self, runs, found):
        self.asked.append(list(runs))
        self.found += found

    def done(self, config, record):
        pass

    def failed(self, config, reason):
        self.broken.append((config, reason))

    def figure(self, outcome):
        self.names.append(outcome.name)

    def dropped(self, figure, reason):
        self.left_out.append((figure.name, reason))
