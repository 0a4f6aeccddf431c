"""The configuration of axolotl 0.19.0: an attribute that is missing is None."""


class DictDefault(dict):
    def __getattr__(self, name):
        return self.get(name)

    __setattr__ = dict.__setitem__
