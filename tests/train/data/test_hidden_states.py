"""Hidden states of sequences in batches against those of one sequence alone."""

import torch
from specstep.compile.source import load_source
from specstep.train.data.hidden_states import feature_layers, hidden_states


def test_hidden_states_are_those_of_one_sequence_alone(model_folder):
    source = load_source(str(model_folder), "float32", "cpu")
    lengths = (3, 9, 1, 30)
    rows = [torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    layers = feature_layers(3)
    assert layers == (2, 1, 0)
    got = {index: states for index, *states in hidden_states(source, [row.tolist() for row in rows], layers)}
    for index, row in enumerate(rows):
        out = source.model.model(row[None], output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[layer][0] for layer in layers], -1)
        torch.testing.assert_close(got[index][0].float(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(got[index][1].float(), out.last_hidden_state[0], rtol=1e-2, atol=1e-2)
