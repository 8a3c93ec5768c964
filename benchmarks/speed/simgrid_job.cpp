// A synchronous training job in SimGrid (S4U), which benchmarks/simgrid.py holds against the fast engine.
//
// Reads one JSON object from standard input and writes one to standard output. Times in seconds, sizes in bytes.
//   ranks, groups      groups of consecutive ranks
//   compute_s          [T][R] compute times, or {mean_s, cv, seed, iterations} to draw normal ones here
//   flow               {bytes, Bps, after_s}: a group's collective is one transfer, then a latency; or
//   ring               {bytes, Bps, hop_s, together}: a ring all-reduce of messages over full-duplex ports of every rank,
//                      which starts, if together, when all of its ranks are there
//   uplink_Bps         the link that all of that traffic shares; 0: none
//   post_work_s          [T][G] work after a group's collective; may be missing
//   barrier_s          the barrier itself
//   tenants            [{Bps, bytes, flows, compute_s: [...], first_s, first_bytes}]: other jobs on the uplink
// Answers with step_s [T] and cpu_s, the CPU time from the end of the first step to the end of the last.
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <simgrid/s4u.hpp>

namespace sg = simgrid::s4u;
using json = nlohmann::json;

constexpr double FLOPS = 1e9; // of every rank; only the time it takes matters

struct Compute { // given compute times, or normal ones
    std::vector<std::vector<double>> given_TR;
    double mean_s = 0.0, cv = 0.0;
    int iterations = 0;
    std::mt19937_64 bits;
    std::normal_distribution<double> normal;

    explicit Compute(const json& said) {
        if (said.is_array()) {
            given_TR = said.get<std::vector<std::vector<double>>>();
            iterations = static_cast<int>(given_TR.size());
        } else {
            mean_s = said.at("mean_s");
            cv = said.at("cv");
            iterations = said.at("iterations");
            bits.seed(said.at("seed").get<unsigned>());
        }
    }
    double seconds(int t, int r) {
        return given_TR.empty() ? std::max(mean_s * (1.0 + cv * normal(bits)), 0.0) : given_TR[t][r];
    }
};

struct Job {
    int ranks, groups, per_group;
    bool is_ring, is_together;
    double bytes, hop_s, after_s, barrier_s;
    Compute compute;
    std::vector<std::vector<double>> post_work_TG;
    std::vector<sg::Host*> hosts; // of the ranks
    std::vector<sg::Host*> ports; // of the groups' flows
    sg::Host* sink = nullptr;
    std::vector<sg::BarrierPtr> arrived_G, reduced_G;
    sg::BarrierPtr all;
    std::vector<double> step_s;
    double cpu_s = 0.0;

    explicit Job(const json& said)
        : ranks(said.at("ranks")), groups(said.at("groups")), per_group(ranks / groups), is_ring(said.contains("ring")),
          is_together(is_ring && said.at("ring").at("together").get<bool>()),
          bytes(said.at(is_ring ? "ring" : "flow").at("bytes")),
          hop_s(is_ring ? said.at("ring").at("hop_s").get<double>() : 0.0),
          after_s(is_ring ? 0.0 : said.at("flow").at("after_s").get<double>()),
          barrier_s(said.at("barrier_s")), compute(said.at("compute_s")) {
        if (said.contains("post_work_s"))
            post_work_TG = said.at("post_work_s").get<std::vector<std::vector<double>>>();
        for (int g = 0; g < groups; g++) {
            arrived_G.push_back(sg::Barrier::create(per_group));
            reduced_G.push_back(sg::Barrier::create(per_group));
        }
        all = sg::Barrier::create(ranks);
    }
};

double cpu_now_s() {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One host with a link in each direction; `above` is what its outgoing traffic shares with others.
// No latency: SimGrid shares a link in inverse proportion to it, and a flow of none would be left with nearly nothing.
sg::Host* add_host(sg::NetZone* zone, const std::string& name, double Bps, sg::Link* above) {
    auto* host = zone->create_host(name, FLOPS)->seal();
    const auto* up = zone->create_link(name + ".up", Bps)->seal();
    const auto* down = zone->create_link(name + ".down", Bps)->seal();
    std::vector<sg::LinkInRoute> out{sg::LinkInRoute(up)};
    if (above)
        out.emplace_back(above);
    zone->add_route(host->get_netpoint(), nullptr, nullptr, nullptr, out, false);
    zone->add_route(nullptr, host->get_netpoint(), nullptr, nullptr, {sg::LinkInRoute(down)}, false);
    return host;
}

// One rank's share of a ring all-reduce: in each of 2 (n - 1) rounds send a chunk ahead and take one from behind.
void reduce_in_ring(const Job& job, int rank) {
    static char chunk;
    const int n = job.per_group, first = rank - rank % n;
    auto* ahead = sg::Mailbox::by_name(std::to_string(first + (rank - first + 1) % n));
    auto* mine = sg::Mailbox::by_name(std::to_string(rank));
    for (int round = 0; round < 2 * (n - 1); round++) {
        auto sent = ahead->put_async(&chunk, static_cast<uint64_t>(job.bytes / n));
        mine->get<char>();
        sent->wait();
        sg::this_actor::sleep_for(job.hop_s);
    }
}

void reduce_as_flow(const Job& job, int rank) {
    const int g = rank / job.per_group;
    job.arrived_G[g]->wait();
    if (rank % job.per_group == 0) {
        sg::Comm::sendto(job.ports[g], job.sink, static_cast<uint64_t>(job.bytes));
        sg::this_actor::sleep_for(job.after_s);
    }
    job.reduced_G[g]->wait();
}

void run_rank(Job& job, int rank) {
    const int g = rank / job.per_group;
    double before_s = 0.0, cpu_s = 0.0;
    for (int t = 0; t < job.compute.iterations; t++) {
        sg::this_actor::execute(job.compute.seconds(t, rank) * FLOPS);
        if (job.is_together)
            job.arrived_G[g]->wait();
        if (job.is_ring)
            reduce_in_ring(job, rank);
        else
            reduce_as_flow(job, rank);
        if (!job.post_work_TG.empty())
            sg::this_actor::sleep_for(job.post_work_TG[t][g]);
        if (job.is_ring || job.groups > 1)
            job.all->wait();
        if (job.barrier_s > 0.0)
            sg::this_actor::sleep_for(job.barrier_s);
        if (rank == 0) {
            job.step_s.push_back(sg::Engine::get_clock() - before_s);
            before_s = sg::Engine::get_clock();
            if (t == 0)
                cpu_s = cpu_now_s();
        }
    }
    if (rank == 0)
        job.cpu_s = cpu_now_s() - cpu_s;
}

// Another job on the uplink: transfers what is left of a first transfer, then computes and transfers again and again, by
// as many flows as one of our groups has there, so that it gets a group's share.
void run_tenant(const json& tenant, sg::Host* port, sg::Host* sink) {
    sg::this_actor::sleep_for(tenant.at("first_s").get<double>());
    const int flows = tenant.at("flows");
    double bytes = tenant.at("first_bytes");
    for (double compute_s : tenant.at("compute_s")) {
        std::vector<sg::CommPtr> sent;
        for (int i = 0; i < flows; i++)
            sent.push_back(sg::Comm::sendto_async(port, sink, static_cast<uint64_t>(bytes / flows)));
        for (const auto& flow : sent)
            flow->wait();
        sg::this_actor::sleep_for(compute_s);
        bytes = tenant.at("bytes");
    }
    std::cerr << "a tenant has run out of compute times" << std::endl;
    std::exit(1);
}

int main(int argc, char** argv) {
    sg::Engine engine(&argc, argv);
    // plain fluid max-min: no slow start, no window, no cost of acknowledgements
    for (const char* option :
         {"network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0",
          "network/latency-factor:1", "network/bandwidth-factor:1", "contexts/stack-size:64", "contexts/guard-size:0"})
        engine.set_config(option);
    const json said = json::parse(std::cin);
    Job job(said);
    const json& net = said.at(job.is_ring ? "ring" : "flow");
    const double uplink_Bps = said.at("uplink_Bps"), Bps = net.at("Bps");

    auto* zone = sg::create_star_zone("fabric");
    sg::Link* uplink = uplink_Bps > 0.0 ? zone->create_link("uplink", uplink_Bps)->seal() : nullptr;
    for (int r = 0; r < job.ranks; r++)
        job.hosts.push_back(job.is_ring ? add_host(zone, "rank" + std::to_string(r), Bps, uplink)
                                        : zone->create_host("rank" + std::to_string(r), FLOPS)->seal());
    job.sink = add_host(zone, "sink", 1e18, nullptr);
    for (int g = 0; g < job.groups && !job.is_ring; g++)
        job.ports.push_back(add_host(zone, "group" + std::to_string(g), Bps, uplink));
    std::vector<sg::Host*> doors;
    for (size_t k = 0; k < said.at("tenants").size(); k++)
        doors.push_back(add_host(zone, "tenant" + std::to_string(k), said["tenants"][k].at("Bps"), uplink));
    zone->seal();

    for (int r = 0; r < job.ranks; r++)
        sg::Actor::create("rank", job.hosts[r], [&job, r] { run_rank(job, r); });
    for (size_t k = 0; k < doors.size(); k++)
        sg::Actor::create("tenant", doors[k], [&, k] { run_tenant(said["tenants"][k], doors[k], job.sink); })->daemonize();
    engine.run();
    std::cout << json{{"step_s", job.step_s}, {"cpu_s", job.cpu_s}} << std::endl;
}
