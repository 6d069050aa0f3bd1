// CartPole in C++, played by a Ludus server in the raw format: sends 4 floats, receives 1 action.
//
//     ludus train -f examples/cartpole_http/cartpole.yaml      # learns from the matches
//     make && ./cartpole 127.0.0.1 8000 2000 10000             # host, port, matches, deadline in ms: long enough for the learning pauses
//
//     ludus serve examples/cartpole_http/cartpole.yaml         # serves the trained agent
//     ./cartpole 127.0.0.1 8000 10
//
// Prints the length of every match (at most 500 frames) and the mean. If the server misses the deadline, the last action is repeated.

#include <cstdio>
#include <cstdlib>

#include "../ludus.hpp"
#include "cart_pole.hpp"

namespace {

const int most_frames = 500;

int fail(const char* what, const ludus::Reply& reply) {
    std::fprintf(stderr, "%s: %s %s\n", what, reply.message.c_str(), reply.hint.c_str());
    return -1;
}

// Play one match; returns its length in frames, or a negative number on failure.
int play(ludus::Client& client, unsigned seed) {
    CartPole game(seed);
    ludus::Session session;
    ludus::Reply reply;
    ludus::RawWriter out;
    if (!client.start(session, ludus::raw_start(), reply)) return fail("start", reply);
    int frames = 0;
    while (frames < most_frames && !game.fallen()) {
        out.begin(frames ? 1.0f : 0.0f).f32s(game.seen(), 4);  // reward of the previous push
        if (!client.tick(session, out.body(), reply)) return fail("tick", reply);
        ludus::RawReader action(reply.body);
        const bool right = action.i64() == 1;
        if (!action.ok() || action.left()) {
            std::fprintf(stderr, "tick: the action has %zu bytes. Are these the spaces of CartPole?\n", reply.body.size());
            return -1;
        }
        game.push(right);
        ++frames;
    }
    out.begin(1.0f, game.fallen(), !game.fallen()).f32s(game.seen(), 4);
    if (!client.end(session, out.body(), reply)) return fail("end", reply);
    if (session.missed()) std::printf("(%llu late) ", static_cast<unsigned long long>(session.missed()));
    return frames;
}

}  // namespace

int main(int count, char** words) {
    ludus::Options options;
    if (count > 1) options.host = words[1];
    if (count > 2) options.port = static_cast<std::uint16_t>(std::atoi(words[2]));
    const int matches = count > 3 ? std::atoi(words[3]) : 10;
    if (const char* token = std::getenv("LUDUS_TOKEN")) options.token = token;
    options.deadline_ms = count > 4 ? std::atoi(words[4]) : 20;  // one physics frame
    options.fallback = ludus::Fallback::Repeat;
    options.default_body = std::string(8, '\0');  // action 0: push left
    ludus::Client client(options);
    double sum = 0;
    for (int match = 0; match < matches; ++match) {
        const int frames = play(client, static_cast<unsigned>(match));
        if (frames < 0) return 1;
        std::printf("match %d: %d frames\n", match + 1, frames);
        sum += frames;
    }
    if (matches > 0) std::printf("mean %.1f frames, %llu ticks late\n", sum / matches, static_cast<unsigned long long>(client.missed()));
    return 0;
}
