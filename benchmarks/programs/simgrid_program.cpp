// A step as a program in SimGrid (S4U), which benchmarks/programs/simgrid_program.py holds against the fast engine.
//
// Reads one JSON object from standard input and writes one to standard output. Times in seconds, sizes in bytes.
//   ranks, Bps, hop_s  one rank a node, a full-duplex port of each, latency of a message
//   uplink_Bps         what the traffic of all ports shares; 0: nothing
//   together           whether a collective waits for all of its members before its first message
//   communicators      for each the list of its operations in a step: {bytes, passes} is a ring of passes * (n - 1)
//                      rounds, {bytes, pairs: true} an all-to-all of n - 1 rounds; all ranks are members
//   step               what every rank does: {compute: i}, {start: c} or {wait: c, number: k}
//   compute_s          [T][R][i] compute times
// Every communicator of a rank is an actor of its own that does what is handed to it in order. Answers with step_s [T].
#include <iostream>
#include <nlohmann/json.hpp>
#include <simgrid/s4u.hpp>

namespace sg = simgrid::s4u;
using json = nlohmann::json;

struct Operation {
    double bytes;
    int passes;
    bool is_pairs;
};

struct Job {
    int ranks, iterations;
    double hop_s;
    bool is_together;
    std::vector<std::vector<Operation>> operations_C;
    json step;
    std::vector<std::vector<std::vector<double>>> compute_TRI;
    std::vector<std::vector<sg::SemaphorePtr>> handed_RC, through_RC;
    std::vector<sg::BarrierPtr> entered_C;
    sg::BarrierPtr all;
    std::vector<double> step_s;
};

sg::Mailbox* box(size_t c, int from, int to) {
    return sg::Mailbox::by_name(std::to_string(c) + ":" + std::to_string(from) + ":" + std::to_string(to));
}

void exchange(const Job& job, size_t c, int to, int me, int from, double bytes) {
    static char chunk;
    auto sent = box(c, me, to)->put_async(&chunk, static_cast<uint64_t>(bytes));
    box(c, from, me)->get<char>();
    sent->wait();
    sg::this_actor::sleep_for(job.hop_s);
}

void run_communicator(Job& job, size_t c, int me) {
    const int n = job.ranks;
    for (int t = 0; t < job.iterations; t++)
        for (const auto& one : job.operations_C[c]) {
            job.handed_RC[me][c]->acquire();
            if (job.is_together)
                job.entered_C[c]->wait();
            const int rounds = one.is_pairs ? n - 1 : one.passes * (n - 1);
            for (int round = 0; round < rounds; round++) {
                const int distance = one.is_pairs ? round + 1 : 1;
                exchange(job, c, (me + distance) % n, me, (me - distance + n) % n, one.bytes / n);
            }
            job.through_RC[me][c]->release();
        }
}

void run_rank(Job& job, int me) {
    double before_s = 0.0;
    for (int t = 0; t < job.iterations; t++) {
        std::vector<int> through_C(job.operations_C.size(), 0);
        for (const auto& one : job.step) {
            if (one.contains("compute")) {
                sg::this_actor::sleep_for(job.compute_TRI[t][me][one["compute"].get<int>()]);
            } else if (one.contains("start")) {
                job.handed_RC[me][one["start"].get<int>()]->release();
            } else {
                const int c = one["wait"];
                for (; through_C[c] <= one["number"].get<int>(); through_C[c]++)
                    job.through_RC[me][c]->acquire();
            }
        }
        job.all->wait();
        if (me == 0) {
            job.step_s.push_back(sg::Engine::get_clock() - before_s);
            before_s = sg::Engine::get_clock();
        }
    }
}

int main(int argc, char** argv) {
    sg::Engine engine(&argc, argv);
    // plain fluid max-min: no slow start, no window, no cost of acknowledgements
    for (const char* option :
         {"network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0",
          "network/latency-factor:1", "network/bandwidth-factor:1", "contexts/stack-size:64", "contexts/guard-size:0"})
        engine.set_config(option);
    const json said = json::parse(std::cin);
    Job job;
    job.ranks = said.at("ranks");
    job.hop_s = said.at("hop_s");
    job.is_together = said.at("together");
    job.step = said.at("step");
    job.compute_TRI = said.at("compute_s").get<std::vector<std::vector<std::vector<double>>>>();
    job.iterations = static_cast<int>(job.compute_TRI.size());
    for (const auto& operations : said.at("communicators")) {
        job.operations_C.emplace_back();
        for (const auto& one : operations)
            job.operations_C.back().push_back({one.at("bytes"), one.value("passes", 1), one.value("pairs", false)});
        job.entered_C.push_back(sg::Barrier::create(job.ranks));
    }
    job.all = sg::Barrier::create(job.ranks);

    auto* zone = sg::create_star_zone("fabric");
    const double Bps = said.at("Bps"), uplink_Bps = said.at("uplink_Bps");
    sg::Link* uplink = uplink_Bps > 0.0 ? zone->create_link("uplink", uplink_Bps)->seal() : nullptr;
    std::vector<sg::Host*> hosts;
    for (int r = 0; r < job.ranks; r++) {
        const std::string name = "rank" + std::to_string(r);
        auto* host = zone->create_host(name, 1e9)->seal();
        const auto* up = zone->create_link(name + ".up", Bps)->seal();
        const auto* down = zone->create_link(name + ".down", Bps)->seal();
        std::vector<sg::LinkInRoute> out{sg::LinkInRoute(up)};
        if (uplink)
            out.emplace_back(uplink);
        zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, out, false);
        zone->add_route(nullptr, host->get_netpoint(), nullptr, nullptr, {sg::LinkInRoute(down)}, false);
        hosts.push_back(host);
    }
    zone->seal();
    for (int r = 0; r < job.ranks; r++) {
        job.handed_RC.emplace_back();
        job.through_RC.emplace_back();
        for (size_t c = 0; c < job.operations_C.size(); c++) {
            job.handed_RC[r].push_back(sg::Semaphore::create(0));
            job.through_RC[r].push_back(sg::Semaphore::create(0));
            sg::Actor::create("communicator", hosts[r], [&job, c, r] { run_communicator(job, c, r); });
        }
        sg::Actor::create("rank", hosts[r], [&job, r] { run_rank(job, r); });
    }
    engine.run();
    std::cout << json{{"step_s", job.step_s}, {"cpu_s", 0.0}} << std::endl;
}
